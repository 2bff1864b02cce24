"""One rank at run time: a thread for each queue, and `step`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from queue import Empty
from types import TracebackType

import torch
from torch import Tensor

from weft.actors import (
    Begin,
    Event,
    QueueMachine,
    actor_text,
    machines,
    when_text,
)
from weft.compiler.memory import Memory
from weft.errors import BatchError, RankFailure
from weft.ir.plan import COMPUTE, Feed, Fetch, Hold, RankPlan
from weft.runtime.channel import Channel
from weft.runtime.failure import PeerFailure, first_line
from weft.runtime.kernel_choice import Kernels
from weft.runtime.measure_step import MeasuredStep
from weft.runtime.parts import Distinct
from weft.runtime.queues import ActError, Control, Ended, Queue, Stop
from weft.runtime.silence import silence_text
from weft.runtime.state import Variables
from weft.runtime.trace import Recorder
from weft.runtime.work import Rank, bind_work
from weft.runtime.world import TIMEOUT

_NOTHING = nullcontext()


class Executor:
    """Runs the plan of one rank.

    The thread that calls `step` computes, and feeds and fetches, which takes no time; every
    communicator has a thread of its own until `close`.

    After the first step, `measured` is the most memory that it took, by kind; `recorder` holds when
    the acts of the last step ran.

    Args:
        plan: what runs.
        channels: this rank's ends of the plan's communicators, by id; closed with the executor.
        device: the rank's device.
        variables: shards of all inputs of the plan that are no batch; states that the optimizer
            makes may be missing.
        optimizer: the user's, for plans with updates.
        seed: of the random ops.
        first_step: number of the first step, for the random ops; a resumed run goes on where it
            ended.
        timeout: seconds without any act after which a step gives up.
        kernels: how segments run.
    """

    def __init__(
        self,
        plan: RankPlan,
        channels: Mapping[int, Channel],
        device: torch.device,
        variables: Variables,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        seed: int = 0,
        first_step: int = 0,
        timeout: float = TIMEOUT,
        kernels: Kernels = "aten",
    ) -> None:
        self.plan = plan
        self.timeout = timeout
        own = _own_thread(plan)
        self._rank = Rank(
            own, device, channels, variables, optimizer, seed, first_step, kernels=kernels
        )
        self._done = 0
        self._keys = {key for actor in plan.actors if isinstance(actor, Feed) for key in actor.keys}
        # The first failure of this rank; set once, under the lock, before anyone is woken.
        self._failure: BaseException | None = None
        # Whether `step` has raised it; another rank may fail between two steps of this one.
        self._raised = False
        self._lock = threading.Lock()
        # Queues that have not ended the step that runs.
        self._open = 0
        self._queues: dict[str, Queue] = {}
        works = {
            actor.id: bind_work(actor, self._rank)
            for actor in own.actors
            if not isinstance(actor, Hold)
        }
        # Memory is measured in the first step.
        self._measuring: MeasuredStep | None = MeasuredStep(plan, works)
        self.measured: Memory | None = None
        every = machines(own)
        every.setdefault(COMPUTE, QueueMachine(own, COMPUTE, in_order=False))
        for name, machine in every.items():
            end = self._end_own if name == COMPUTE else partial(self._end_other, name)
            control = self._control_own if name == COMPUTE else self._control_other
            Queue(machine, works, self._queues, end, control)
        self._compute = self._queues[COMPUTE]
        self.recorder = Recorder(queue.spans for queue in self._queues.values())
        for channel in channels.values():
            channel.watch(self._fail)
        self._threads = [
            self._thread(queue) for name, queue in self._queues.items() if name != COMPUTE
        ]

    @property
    def parts(self) -> tuple[Distinct, ...]:
        """The distinct parts of the segments that were to be compiled; none with ATen kernels."""
        return () if self._rank.parts is None else tuple(self._rank.parts.distinct.values())

    @property
    def steps(self) -> int:
        """Number of the next step, for the random ops."""
        return self._rank.first_step + self._done

    def step(self, feed: Mapping[str, Tensor], update: bool = True) -> dict[str, Tensor]:
        """Run one step.

        Args:
            feed: this rank's part of every leaf of the batch, by key.
            update: False keeps the gradients and adds them to those of the next step.

        Returns:
            What the plan fetches, by key, once every actor has acted.

        Raises:
            BatchError: when a leaf of the batch is missing.
            RankFailure: when an actor of this rank raised (its error is the cause), when another
                rank failed, or when nothing happened for `timeout` seconds. No later step will run.
        """
        if self._failure is not None and not self._raised:
            self._raised = True
            raise self._failure from self._failure.__cause__
        if self._failure is not None:
            text = f"rank {self.plan.rank} has already failed: {first_line(self._failure)}"
            raise RankFailure(text) from self._failure
        missing = sorted(self._keys - set(feed))
        if missing:
            raise BatchError(f"the batch has no {', '.join(missing)}; it has {sorted(feed)}")
        step = self._done
        self._rank.batches.fed[step] = feed
        self._rank.batches.held = not update
        self.recorder.begin()
        try:
            self._run(step)
        except BaseException as error:
            failure = self._fail(error)
            self._raised = True
            raise failure from failure.__cause__
        self.recorder.end(step)
        self._done += 1
        results = self._rank.batches.fetched.pop(step, {})
        if self._measuring is not None:
            self.measured = self._measuring.end(self._rank.variables, feed, results.values())
            self._measuring = None
        return results

    def close(self) -> None:
        """End the threads and close the channels."""
        for queue in self._queues.values():
            queue.mailbox.put(Stop())
        # After a failure a thread may still wait for a peer that is gone; it ends with the process.
        patience = 5.0 if self._failure is None else 0.5
        for thread in self._threads:
            thread.join(patience)
        self._threads = []
        for channel in self._rank.channels.values():
            channel.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, step: int) -> None:
        self._open = len(self._queues)
        for name, queue in self._queues.items():
            if name != COMPUTE:
                queue.mailbox.put(Begin(step))
        with torch.no_grad(), _no_autocast(self._rank.device.type):
            self._use_device()
            self._compute.receive(Begin(step))
            while self._open:
                self._compute.receive(self._wait())

    def _wait(self) -> Event | Control:
        """The next message of the compute queue; gives up when no queue starts an act for `timeout` seconds."""
        started = self._started()
        while True:
            try:
                return self._compute.mailbox.get(timeout=self.timeout)
            except Empty:
                if self._started() == started:
                    raise self._silence() from None
                started = self._started()

    def _started(self) -> int:
        return sum(queue.machine.started for queue in self._queues.values())

    def _silence(self) -> RankFailure:
        statistics = [queue.machine.statistics() for queue in self._queues.values()]
        text = silence_text(self.plan, statistics, self._rank.channels)
        return RankFailure(
            f"rank {self.plan.rank}: nothing happened for {self.timeout:g} s; {text}"
        )

    def _thread(self, queue: Queue) -> threading.Thread:
        name = f"weft rank {self.plan.rank} {queue.name}"
        thread = threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True)
        thread.start()
        return thread

    def _serve(self, queue: Queue) -> None:
        """The life of a thread of a queue other than compute."""
        try:
            with torch.no_grad():
                self._use_device()
                while True:
                    queue.receive(queue.mailbox.get())
        except _Stopped:
            return
        except BaseException as error:
            self._fail(error)

    def _use_device(self) -> None:
        if self._rank.device.type == "cuda":
            torch.cuda.set_device(self._rank.device)

    def _fail(self, error: BaseException) -> BaseException:
        """Record a failure, wake everyone who waits for this rank, and return the failure that came first."""
        with self._lock:
            first = self._failure is None
            if self._failure is None:
                self._failure = self._explain(error)
        if first:
            cause = self._failure.__cause__ or self._failure
            for channel in self._rank.channels.values():
                channel.abort(cause)
            for queue in self._queues.values():
                queue.mailbox.put(Stop())
        return self._failure

    def _explain(self, error: BaseException) -> BaseException:
        """Name the actor that raised."""
        cause = error.__cause__
        if not isinstance(error, ActError) or cause is None:
            return error
        if not isinstance(cause, Exception):
            return cause
        act, actor = error.act, self.plan.actors[error.act.actor]
        where = f"{actor_text(actor)} failed in {when_text(actor, act.step, act.micro)}"
        kind = PeerFailure if isinstance(cause, PeerFailure) else RankFailure
        failure = kind(f"rank {self.plan.rank}: {where}: {first_line(cause)}")
        failure.__cause__ = cause
        return failure

    def _end_own(self, step: int) -> None:
        self._open -= 1

    def _end_other(self, queue: str, step: int) -> None:
        self._compute.mailbox.put(Ended(queue, step))

    def _control_own(self, message: Control) -> None:
        if isinstance(message, Ended):
            self._open -= 1
        elif self._failure is not None:
            raise _Stopped

    def _control_other(self, message: Control) -> None:
        raise _Stopped


class _Stopped(Exception):
    """A queue was told to start no further act."""


def _own_thread(plan: RankPlan) -> RankPlan:
    """The plan with feed and fetch on the compute queue: a thread of their own would cost more than they do.

    What may fire stays so until it fires, so a plan that is live remains so.
    """
    actors = (
        replace(actor, queue=COMPUTE) if isinstance(actor, (Feed, Fetch)) else actor
        for actor in plan.actors
    )
    return replace(plan, actors=tuple(actors))


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Ends an autocast of the caller, which is in the graph already, where it belongs."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NOTHING
