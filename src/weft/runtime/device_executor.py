"""One rank on a device with streams: a step is a list of acts, put on its way by the thread that calls `step`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from weft.actors import Act, actor_text, when_text
from weft.compiler.memory import Memory
from weft.errors import BatchError, RankFailure
from weft.ir.plan import Feed, Hold, RankPlan
from weft.runtime.channel import Channel
from weft.runtime.cuda_streams import CudaStreams
from weft.runtime.failure import PeerFailure, first_line
from weft.runtime.kernel_choice import Kernels
from weft.runtime.launch_record import LaunchRecorder
from weft.runtime.launches import Key, Launch, launches
from weft.runtime.measure_step import MeasuredStep
from weft.runtime.parts import Distinct
from weft.runtime.state import Variables
from weft.runtime.streams import Inline, Streams
from weft.runtime.work import Rank, bind_work
from weft.runtime.world import TIMEOUT

# Makes the streams of a rank, given its device, its acts, the time-out, and names of acts by place.
MakeStreams: TypeAlias = Callable[
    [torch.device, Sequence[Launch], float, Callable[[int], str]], Streams
]


class DeviceExecutor:
    """Runs the plan of one rank as `weft.runtime.executor.Executor` does, without threads.

    `step` returns once all work is on its way; what it returns may be used on the current stream at
    once. After the first step, `measured` is the most memory that it took, by kind.

    Args:
        plan: what runs.
        channels: this rank's ends of the plan's communicators, by id; closed with the executor.
        device: the rank's device.
        variables: shards of all inputs of the plan that are no batch; states that the optimizer
            makes may be missing.
        optimizer: the user's, for plans with updates.
        seed: of the random ops.
        timeout: seconds without the end of any act after which a step gives up.
        kernels: how segments run.
        order: (actor, micro-batch) of all acts of a step, as rehearsed; by default that of the plan.
        make_streams: what makes the streams.
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
        timeout: float = TIMEOUT,
        kernels: Kernels = "aten",
        order: Iterable[tuple[int, int]] | None = None,
        make_streams: MakeStreams | None = None,
    ) -> None:
        self.plan = plan
        self.measured: Memory | None = None
        self._rank = Rank(plan, device, channels, variables, optimizer, seed, kernels=kernels)
        self._done = 0
        self._keys = {key for actor in plan.actors if isinstance(actor, Feed) for key in actor.keys}
        # The first failure of this rank, and whether `step` has raised it.
        self._failure: BaseException | None = None
        self._raised = False
        self._works = {
            actor.id: bind_work(actor, self._rank)
            for actor in plan.actors
            if not isinstance(actor, Hold)
        }
        self._launches = launches(plan, self._works, order)
        # Memory is measured in the first step.
        self._measuring: MeasuredStep | None = MeasuredStep(plan, self._works)
        make = make_streams or (CudaStreams if device.type == "cuda" else _inline)
        self._streams = make(device, self._launches, timeout, self._act_text)
        self.recorder = LaunchRecorder(self._launches, self._streams)
        for channel in channels.values():
            channel.watch(self._fail)

    @property
    def parts(self) -> tuple[Distinct, ...]:
        """The distinct parts of the segments that were to be compiled; none with ATen kernels."""
        return () if self._rank.parts is None else tuple(self._rank.parts.distinct.values())

    @property
    def steps(self) -> int:
        """Number of the next step, for the random ops."""
        return self._done

    def step(self, feed: Mapping[str, Tensor], update: bool = True) -> dict[str, Tensor]:
        """Put one step on its way.

        Args:
            feed: this rank's part of every leaf of the batch, by key.
            update: False keeps the gradients and adds them to those of the next step.

        Returns:
            What the plan fetches, by key.

        Raises:
            BatchError: when a leaf of the batch is missing.
            RankFailure: when an actor of this rank raised (its error is the cause), when another
                rank failed, or when the device ends no act for `timeout` seconds. No later step
                will run.
        """
        self._check(feed)
        step = self._done
        self._rank.batches.fed[step] = feed
        self._rank.batches.held = not update
        self.recorder.begin()
        try:
            results = self._run(step)
        except BaseException as error:
            self._streams.stop()
            failure = self._fail(error)
            self._raised = True
            raise failure from failure.__cause__
        self.recorder.end(step)
        self._done += 1
        if self._measuring is not None:
            self.measured = self._measuring.end(self._rank.variables, feed, results.values())
            self._measuring = None
        return results

    def close(self) -> None:
        """Close the channels, once nothing uses them any more."""
        if self._failure is None:
            self._streams.wait()
        for channel in self._rank.channels.values():
            channel.close()

    def _check(self, feed: Mapping[str, Tensor]) -> None:
        """Raise what stands against another step."""
        failure = self._failure
        if failure is not None and self._raised:
            text = f"rank {self.plan.rank} has already failed: {first_line(failure)}"
            raise RankFailure(text) from failure
        if failure is not None:
            self._raised = True
            raise failure from failure.__cause__
        missing = sorted(self._keys - set(feed))
        if missing:
            raise BatchError(f"the batch has no {', '.join(missing)}; it has {sorted(feed)}")

    def _run(self, step: int) -> dict[str, Tensor]:
        self._streams.begin()
        tensors: dict[Key, Tensor] = {}
        with torch.no_grad(), torch.autocast(self._rank.device.type, enabled=False):
            for launch in self._launches:
                try:
                    self._act(launch, step, tensors)
                except BaseException as error:
                    raise self._explain(launch, step, error) from error
        results = self._rank.batches.fetched.pop(step, {})
        self._streams.end(results.values())
        return results

    def _act(self, launch: Launch, step: int, tensors: dict[Key, Tensor]) -> None:
        """Put an act on its way; nothing here outlives it, so that memory goes when it is free."""
        self._streams.enter(launch)
        inputs = []
        for read in launch.reads:
            inputs.append(tensors.pop(read.key) if read.last else tensors[read.key])
            if read.foreign:
                self._streams.read(inputs[-1])
        outputs = self._works[launch.actor].act(step, launch.micro, inputs)
        self._streams.leave(launch)
        for key, tensor in zip(launch.writes, outputs, strict=True):
            if key is not None:
                tensors[key] = tensor

    def _act_text(self, place: int) -> str:
        launch = self._launches[place]
        actor = self.plan.actors[launch.actor]
        when = f"micro-batch {launch.micro}" if actor.acts > 1 else "the step"
        return f"{actor_text(actor)}, {when}"

    def _explain(self, launch: Launch, step: int, cause: BaseException) -> BaseException:
        """Name the actor that raised."""
        if not isinstance(cause, Exception):
            return cause
        actor = self.plan.actors[launch.actor]
        act = Act(launch.actor, step, launch.micro)
        where = f"{actor_text(actor)} failed in {when_text(actor, act.step, act.micro)}"
        kind = PeerFailure if isinstance(cause, PeerFailure) else RankFailure
        return kind(f"rank {self.plan.rank}: {where}: {first_line(cause)}")

    def _fail(self, error: BaseException) -> BaseException:
        """Record a failure, wake everyone who waits for this rank, and return the one that came first."""
        if self._failure is None:
            self._failure = error
            for channel in self._rank.channels.values():
                channel.abort(error.__cause__ or error)
        return self._failure


def _inline(
    device: torch.device, acts: Sequence[Launch], timeout: float, text: Callable[[int], str]
) -> Streams:
    return Inline(len(acts))
