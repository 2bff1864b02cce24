"""One rank at run time: a thread for each queue, and `step`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from queue import Empty
from typing import final

import torch

from weft.actors import (
    Act,
    Begin,
    Event,
    QueueMachine,
    QueueStatistics,
    actor_text,
    machines,
    root_cause,
    waiting_text,
    when_text,
)
from weft.actors.messages import IssueSlot
from weft.errors import NoAnswer
from weft.ir.plan import COMPUTE, Communicate, Feed, Fetch, Order, RankPlan
from weft.runtime.channels.channel import Channel
from weft.runtime.executor.queues import ActError, Control, Ended, Gate, Queue, Stop
from weft.runtime.executor.rank_executor import RankExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.recording import Recorder
from weft.runtime.world.world import TIMEOUT

_NOTHING = nullcontext()


@final
class ThreadExecutor(RankExecutor):
    """Runs the plan of one rank on a device that computes where it is called: a CPU.

    The thread that calls `step` computes, and feeds and fetches, which takes no time; every communicator has a thread
    of its own until `close`, in whose place the first one acts where nothing else can continue meanwhile.

    Args:
        turns: the acts of a step that take memory, in the order of the plan, and what each waits for; without them
            the compute queue takes what is ready, and no act waits for what it does not read.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        timeout: float = TIMEOUT,
        turns: Sequence[IssueSlot] = (),
    ) -> None:
        plan, channels = rank.plan, rank.channels
        own = _own_thread(plan, turns)
        super().__init__(plan, replace(rank, plan=own))
        self.timeout = timeout
        # Queues that have not ended the step that runs.
        self._open = 0
        self._queues: dict[str, Queue] = {}
        gate = Gate(turns)
        self._gate = gate if gate.needed else None
        every = machines(own)
        every.setdefault(COMPUTE, QueueMachine(own, COMPUTE, in_order=False))
        for name, machine in every.items():
            end = self._end_own if name == COMPUTE else partial(self._end_other, name)
            control = self._control_own if name == COMPUTE else self._control_other
            Queue(machine, self._works, self._queues, end, control, self._gate)
        self._compute = self._queues[COMPUTE]
        self._others = [queue for name, queue in self._queues.items() if name != COMPUTE]
        # For each communicator's queue; others, such as those of copies to the host, have none.
        acts = (actor for actor in plan.actors if isinstance(actor, Communicate))
        self._by_queue = {a.queue: channels[a.collectives[0].communicator] for a in acts}
        self.recorder = Recorder(queue.work.spans for queue in self._queues.values())
        for channel in channels.values():
            channel.watch(self._fail)
            channel.spins = False
        self._threads = []
        for queue in self._others:
            name = f"weft rank {plan.rank} {queue.name}"
            thread = threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads and close the channels."""
        for queue in self._queues.values():
            queue.post(Stop())
        # After a failure a thread may still wait for a peer that is gone; it ends with the process.
        patience = 5.0 if self._failure is None else 0.5
        for thread in self._threads:
            thread.join(patience)
        self._threads = []
        for channel in self._rank.channels.values():
            channel.close()

    def _run(self, step: int) -> None:
        self._open = len(self._queues)
        if self._gate is not None:
            self._gate.begin()
        for queue in self._others:
            queue.mailbox.put(Begin(step))
            self._compute.told.append(queue)
        with torch.no_grad(), _no_autocast(self._rank.device.type):
            self._compute.receive(Begin(step))
            while self._open:
                self._call_others()
                self._compute.receive(self._wait())

    def _call_others(self) -> None:
        """Run the work that the compute queue has sent: here, if the rank can do nothing else, or in other threads.

        Were there anything else that could continue, it might give the compute queue an act, for which
        the peers might wait before they come to the communication that runs here.
        """
        told = dict.fromkeys(self._compute.told)
        self._compute.told.clear()
        ready = [queue for queue in told if queue.prepare()]
        if len(ready) == 1 and self._acted_here(ready[0]):
            return
        for queue in ready:
            queue.bell.put(None)

    def _acted_here(self, queue: Queue) -> bool:
        """Run the act of a queue if all other queues rest; whether it was run."""
        channel = self._by_queue.get(queue.name)
        if channel is None or not channel.interruptible:
            return False
        with ExitStack() as held:
            for each in self._others:
                if not each.lock.acquire(blocking=False):
                    return False
                held.callback(each.lock.release)
            if not self._compute.mailbox.empty() or not all(
                each is queue or each.rests for each in self._others
            ):
                return False
            # Nobody else needs this core now.
            channel.spins = True
            try:
                queue.act_here()
            finally:
                channel.spins = False
        return True

    def _wait(self) -> Event | Control:
        started = self._started()
        while True:
            try:
                return self._compute.mailbox.get(timeout=self.timeout)
            except Empty:
                if self._started() == started:
                    raise self._stall_report() from None
                started = self._started()

    def _started(self) -> int:
        return sum(queue.machine.started for queue in self._queues.values())

    def _stall_report(self) -> NoAnswer:
        statistics = [queue.machine.statistics() for queue in self._queues.values()]
        text = stall_report(self.plan, statistics, self._rank.channels)
        return NoAnswer(f"rank {self.plan.rank}: nothing happened for {self.timeout:g} s; {text}")

    def _serve(self, queue: Queue) -> None:
        try:
            with torch.no_grad():
                while True:
                    queue.serve()
        except _Stopped:
            return
        except BaseException as error:
            self._fail(error)

    def _wake(self) -> None:
        for queue in self._queues.values():
            queue.post(Stop())

    def _explain(self, error: BaseException) -> BaseException:
        cause = error.__cause__
        if not isinstance(error, ActError) or cause is None:
            return error
        return self._named(error.act, cause)

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


@final
class _Stopped(Exception):
    """A queue was told to start no further act."""


def _own_thread(plan: RankPlan, turns: Sequence[IssueSlot]) -> RankPlan:
    """The plan with feed and fetch on the compute queue: a thread of their own would cost more than they do.

    An actor that may act stays ready until it acts, so a live plan remains live. With turns the compute queue keeps
    their order, between feed and fetch.
    """
    actors = tuple(
        replace(actor, queue=COMPUTE) if isinstance(actor, (Feed, Fetch)) else actor
        for actor in plan.actors
    )
    if not turns:
        return replace(plan, actors=actors)
    computes = ((turn.actor, turn.micro) for turn in turns if actors[turn.actor].queue == COMPUTE)
    feeds = ((actor.id, 0) for actor in actors if isinstance(actor, Feed))
    fetches = ((actor.id, 0) for actor in actors if isinstance(actor, Fetch))
    order = Order(COMPUTE, (*feeds, *computes, *fetches))
    return replace(plan, actors=actors, orders=(*plan.orders, order))


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Ends an autocast of the caller, which is in the graph already, where it belongs."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NOTHING


def stall_report(
    plan: RankPlan, statistics: Sequence[QueueStatistics], channels: Mapping[int, Channel]
) -> str:
    """Names actors with what they wait for: registers, free copies, their turn, peers."""
    acts = {queue.running.actor: queue.running for queue in statistics if queue.running}
    blamed = root_cause(plan, statistics)
    names = [actor_text(plan.actors[id]) for id in blamed]
    root = f"everything waits for {''.join(names)}"
    if len(blamed) > 1:
        root = f"each of {', '.join(names)} waits for the next one"
    elif blamed and blamed[0] in acts:
        root += f", which {_doing(plan, acts[blamed[0]], channels)}"
    lines = [
        f"  {actor_text(plan.actors[id])} {_doing(plan, act, channels)}" for id, act in acts.items()
    ]
    return "\n".join([root, waiting_text(plan, statistics), *lines])


def _doing(plan: RankPlan, act: Act, channels: Mapping[int, Channel]) -> str:
    actor = plan.actors[act.actor]
    when = when_text(actor, act.step, act.micro)
    if not isinstance(actor, Communicate):
        return f"has not ended in {when}"
    ranks = channels[actor.collectives[0].communicator].ranks
    peers = [rank for rank in ranks if rank != plan.rank]
    return f"waits for ranks {peers} in {when}"
