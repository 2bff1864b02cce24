"""Plans of one step for batches of several shapes, which share variables, states and kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.capture import Captured
from weft.capture.batch import BatchSpec, describe_batch
from weft.compiler.pipeline import Compiled
from weft.errors import BatchError, UserError
from weft.ir.logical import Input
from weft.ir.nodes import VARIABLE_ROLES
from weft.layout import Layout
from weft.program.build import Setting, build
from weft.program.feed import Feeder
from weft.program.guards import Guards
from weft.program.shards import without_shards
from weft.runtime.device_executor import DeviceExecutor
from weft.runtime.executor import Executor

Planned: TypeAlias = tuple[Captured, Compiled]
# How many shapes a program is planned for; each keeps a plan, its threads and its kernels.
MOST_SHAPES = 16
_log = logging.getLogger("weft")


@dataclass(frozen=True)
class Variant:
    """The step for one shape of the batch, ready to run."""

    captured: Captured
    compiled: Compiled
    executors: Mapping[int, Executor | DeviceExecutor]
    feeder: Feeder
    guards: Guards

    @cached_property
    def shapes(self) -> str:
        """The leaves of its batch."""
        return _shapes(self.captured.batch)

    def step(
        self,
        setting: Setting,
        number: int,
        feeds: Mapping[int, Mapping[str, Tensor]],
        update: bool,
        stamp: int,
    ) -> Any:
        """Run step `number` of the program on what each rank takes of a batch; messages carry the stamp."""
        for executor in self.executors.values():
            executor.steps = number
            executor.put_stamp(stamp)
        results = setting.run(lambda rank: self.executors[rank].step(feeds[rank], update))
        return self.captured.unflatten_outputs(results)

    def close(self) -> None:
        for executor in self.executors.values():
            executor.close()


class Variants:
    """The variants of one program: the first, and one more for each other shape that a batch has.

    Args:
        setting: of the program.
        first: as compiled.
        optimizer: the user's; None for evaluation.
        plan: what a step is for another batch, as `plan(batch)`.

    Attributes:
        current: the one that ran last, or is to run.
    """

    def __init__(
        self,
        setting: Setting,
        first: Planned,
        optimizer: torch.optim.Optimizer | None,
        plan: Callable[[Any], Planned],
    ) -> None:
        self.setting = setting
        self.optimizer = optimizer
        self._plan = plan
        self._all = [self._build(*first)]
        self.current = self._all[0]

    def feeds(
        self, batch: Any, step: int, enter: Callable[[str], object]
    ) -> tuple[dict[int, dict[str, Tensor]], int]:
        """What each rank takes of a batch, and its checksum; afterwards `current` is the variant for its shape.

        Args:
            batch: of any shape.
            step: of the program.
            enter: is told the shape as soon as it is known, before anything needs the other ranks.

        Raises:
            BatchError: when the batch differs from the example in more than shapes, or there are
                too many shapes.
        """
        try:
            found = self.current.feeder.feeds(batch, step)
        except BatchError as error:
            self.current = self._other(batch, error, enter)
            return self.current.feeder.feeds(batch, step)
        enter(self.current.shapes)
        return found

    def close(self) -> None:
        """End the threads of all."""
        for variant in self._all:
            variant.close()

    def _other(self, batch: Any, error: BatchError, enter: Callable[[str], object]) -> Variant:
        for variant in self._all:
            if variant.feeder.takes(batch):
                enter(variant.shapes)
                return variant
        if not self.current.feeder.differs_in_shape(batch):
            raise error
        if len(self._all) == MOST_SHAPES:
            raise BatchError(
                f"{error}. The program is planned for {MOST_SHAPES} shapes already, which is the most; pad batches "
                "to a few lengths"
            ) from None
        started = time.perf_counter()
        shapes = _shapes(describe_batch(without_shards(batch)[0]))
        enter(shapes)
        variant = self._build(*self._checked(self._plan(batch)))
        self._all.append(variant)
        seconds = time.perf_counter() - started
        _log.info("planned the step for another shape of the batch (%s) in %.1f s", shapes, seconds)
        return variant

    def _checked(self, planned: Planned) -> Planned:
        """The same plan, when its variables lie as those of the first one do."""
        first, other = _layouts(self._all[0].compiled), _layouts(planned[1])
        for key in other:
            if key in first and other[key] != first[key]:
                raise UserError(
                    f"for this shape of the batch {key} would lie as {other[key]}, but it lies as {first[key]}; name "
                    f"its layout in Strategy(parameters={{{key!r}: …}}), so that it is the same for all shapes"
                )
        return planned

    def _build(self, captured: Captured, compiled: Compiled) -> Variant:
        setting = self.setting
        executors = build(setting, captured.constants, compiled, self.optimizer)
        devices = {rank: setting.world.device(rank) for rank in executors}
        guards = Guards(captured.watch, setting.model, self.optimizer)
        feeder = Feeder(captured.batch, compiled.graph, devices, setting.several)
        return Variant(captured, compiled, executors, feeder, guards)


def _shapes(batch: BatchSpec) -> str:
    return ", ".join(f"{leaf.key} {leaf.dtype}{list(leaf.shape)}" for leaf in batch.tensors)


def _layouts(compiled: Compiled) -> dict[str, Layout | None]:
    """How the variables of a plan lie."""
    inputs = compiled.graph.of_kind(Input)
    return {node.key: node.value.layout for node in inputs if node.role in VARIABLE_ROLES}
