"""One rank on a device with streams: a step is a list of acts, put on its way by the thread that calls `step`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from weft.actors import Act, actor_text
from weft.capture.optimizers.groups import Optimizing
from weft.ir.plan import RankPlan
from weft.runtime.channels.channel import Channel
from weft.runtime.compiled.choice import Kernels
from weft.runtime.devices.launch import Key, Launch
from weft.runtime.devices.launch_record import LaunchRecorder
from weft.runtime.devices.replay import Replayer
from weft.runtime.devices.streams import MakeStreams
from weft.runtime.executor.launches import launches
from weft.runtime.executor.rank_executor import RankExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import TIMEOUT


@final
class DeviceExecutor(RankExecutor):
    """Runs the plan of one rank as `weft.runtime.executor.threads.Executor` does, without threads.

    `step` returns once all work is on its way.

    Args:
        plan: what runs.
        channels: this rank's ends of the plan's communicators, by id; closed with the executor.
        device: the rank's device.
        variables: shards of all inputs of the plan that are no batch; states that the optimizer
            makes may be missing.
        make_streams: what makes the streams.
        optimizer: the user's, one or several, for plans with updates.
        seed: of the random ops.
        timeout: seconds without the end of any act after which a step gives up.
        kernels: how segments run.
        order: (actor, micro-batch) of all acts of a step, as simulated; by default that of the plan.
        replayer: what replays segments as CUDA graphs, if any.
    """

    def __init__(
        self,
        plan: RankPlan,
        channels: Mapping[int, Channel],
        device: torch.device,
        variables: Variables,
        make_streams: MakeStreams,
        *,
        optimizer: Optimizing = None,
        seed: int = 0,
        timeout: float = TIMEOUT,
        kernels: Kernels = "aten",
        order: Iterable[tuple[int, int]] | None = None,
        replayer: Replayer | None = None,
    ) -> None:
        own = Rank(
            plan, device, channels, variables, optimizer, seed, kernels=kernels, replayer=replayer
        )
        super().__init__(plan, own)
        self._launches = launches(plan, self._works, order)
        self._streams = make_streams(device, self._launches, timeout, self._act_text)
        self.recorder = LaunchRecorder(self._launches, self._streams)
        for channel in channels.values():
            channel.watch(self._fail)

    def close(self) -> None:
        """Close the channels, once nothing uses them any more."""
        if self._failure is None:
            self._streams.wait()
        for channel in self._rank.channels.values():
            channel.close()

    def _run(self, step: int) -> None:
        self._streams.begin()
        try:
            self._launch(step)
        except BaseException:
            self._streams.stop()
            raise
        self._streams.end(self._rank.batches.fetched.get(step, {}).values())

    def _launch(self, step: int) -> None:
        tensors: dict[Key, Tensor] = {}
        with torch.no_grad(), torch.autocast(self._rank.device.type, enabled=False):
            for launch in self._launches:
                try:
                    self._act(launch, step, tensors)
                except BaseException as error:
                    raise self._named(Act(launch.actor, step, launch.micro), error) from error

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

    def _wake(self) -> None:
        """Nobody waits on the host; what waits on the device ends with the channels."""

    def _act_text(self, place: int) -> str:
        launch = self._launches[place]
        actor = self.plan.actors[launch.actor]
        when = f"micro-batch {launch.micro}" if actor.acts > 1 else "the step"
        return f"{actor_text(actor)}, {when}"
