"""Plans of one step for batches of several shapes and other values of Python, which share variables and states."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, TypeAlias, final

import torch
from torch import Tensor

from weft.capture import Captured
from weft.capture.batch import BatchSpec, describe_batch
from weft.capture.optimizer_groups import Optimizers
from weft.capture.python.symbolic import number_now
from weft.compiler.context import Metric, Options, options_of
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import split_parameters, strategy_hints, with_leaves
from weft.compiler.training.gradients import METRIC
from weft.errors import BatchError, UserError
from weft.hardware import default_device
from weft.hardware.costs import Costs
from weft.hardware.measured_costs import MeasuredCosts, from_json, to_json
from weft.hardware.planning_costs import behind_links, catalogue_costs, costs_at_hand
from weft.ir.logical import Input
from weft.ir.nodes import VARIABLE_ROLES, Role
from weft.layout import Placement
from weft.planning.progress import uncollected
from weft.program.agreement import gathered, run_on_all
from weft.program.checksums import BatchChecksums
from weft.program.data.feed import (
    CutParts,
    Feeder,
    RowsOfBatch,
    WholeBatch,
    shares_of,
    whole_batch_of,
)
from weft.program.live.ownership import LiveShardings
from weft.program.planning.build import build, close_all, local_ranks, with_lying
from weft.program.planning.step import Guards, Step
from weft.program.setting import ProgramSetting
from weft.runtime.compiled.choice import Kernels
from weft.runtime.executor.rank_executor import RankExecutor
from weft.runtime.world.world import World
from weft.strategy.strategy import Strategy

Planned: TypeAlias = tuple[Captured, Compiled]
# How often a program is planned for shapes, and for values of Python; each plan keeps its threads and its kernels.
MOST = 16
_log = logging.getLogger("weft")


@final
@dataclass(frozen=True)
class Variant:
    """The step for one shape of the batch, and for what the guards compare, ready to run."""

    number: int
    captured: Captured
    compiled: Compiled
    executors: Mapping[int, RankExecutor]
    feeder: Feeder
    guards: Guards

    @cached_property
    def name(self) -> str:
        """The leaves of its batch; and which plan it is, where ranks could choose another one."""
        shapes = _shapes(self.captured.batch)
        return f"{shapes} (planned again, no. {self.number})" if self.number else shapes

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of Python as they are now for which constants stand, by the keys of these."""
        return {key: number_now(number) for key, number in self.captured.numbers.items()}

    def serves(self, batch: Any) -> bool:
        """True if it is the step for a batch, as things are now."""
        return self.guards.changed() is None and self.feeder.takes(batch)

    def step(
        self,
        setting: ProgramSetting,
        number: int,
        feeds: Mapping[int, Mapping[str, Tensor]],
        update: bool,
        checksum: Callable[[tuple[int, ...]], int] | None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run step `number` on the leaves of each rank; messages carry the `checksum`, if there is one."""
        numbers = self.numbers
        self.guards.outside.follow(self.executors.values())
        for executor in self.executors.values():
            executor.steps = number
            executor.put_numbers(numbers)
            if checksum is not None:
                executor.put_checksum(checksum)
        results = setting.run(lambda rank: self.executors[rank].step(feeds[rank], update))
        metrics = {k.removeprefix(METRIC): x for k, x in results.items() if k.startswith(METRIC)}
        if "loss" in results:  # pickles and copies hold no method of it
            vars(results["loss"]).update(backward=_made_already, __getstate__=dict)
        return self.captured.unflatten_outputs(results), metrics


def _made_already(*_: object, **__: object) -> NoReturn:
    raise UserError(
        "backward() of the loss that program.step has returned: the step has made gradients and the update already. "
        "Leave backward(), optimizer.step(), clip_grad_norm_ and zero_grad() out of the loop; "
        "program.step(batch, update=False) makes gradients alone, and clip_norm= of the strategy clips them"
    )


@final
class Variants:
    """The variants of one program: the first, and more for other shapes of the batch and other values of Python.

    Args:
        plan: plans the step for a batch, as things are now; needs no other process.
        note: is told each plan that is built.

    Attributes:
        current: the variant that ran last, or is to run.
    """

    def __init__(
        self,
        setting: ProgramSetting,
        first: Planned,
        step: Step,
        plan: Callable[[Any], Planned],
        note: Callable[[Compiled], None] = lambda _: None,
    ) -> None:
        self.setting = setting
        self._step = step
        self.optimizers = step.optimizers
        self._plan = plan
        self._note = note
        self._all: list[Variant] = []
        self._all.append(self._build(first))
        self.current = self._all[0]
        # How many of all but the first were planned for other values of Python.
        self._for_values = 0

    def feeds(
        self, batch: Any, step: int, enter: Callable[[str], object]
    ) -> tuple[dict[int, dict[str, Tensor]], BatchChecksums]:
        """Give each rank its leaves of a batch, and their checksums; `current` is the variant for it then.

        Args:
            enter: is told the variant as soon as it is known, before any exchange with other ranks.

        Raises:
            BatchError: the batch differs from the example in more than shapes, or there are too many plans for shapes.
            UserError: there are too many plans for values of Python.
        """
        self.current.feeder.note_constants(batch)
        changed = self.current.guards.changed()
        try:
            found = None if changed else self.current.feeder.feeds(batch, step)
        except BatchError as error:
            found = None
            if not self.current.feeder.differs_in_shape(batch):
                raise
            changed = str(error)
        if found is None:
            self.current = self._other(batch, changed or "", enter)
            return self.current.feeder.feeds(batch, step)
        enter(self.current.name)
        return found

    def cut(self, batch: Any) -> tuple[Feeder, CutParts] | None:
        """The parts of a batch of the host, by the first plan that takes it; None if there is none for it yet.

        Any thread may call it: `feeds` looks later whether it was cut as the step wants it.
        """
        for variant in (self.current, *self._all):
            try:
                return variant.feeder, variant.feeder.cut(batch)
            except BatchError:
                continue
        return None

    def rows(self, size: int) -> list[int]:
        """The rows of a batch of so many that the ranks of this process take; all where there is no plan for it yet."""
        return min((each.feeder.rows(size) for each in self._all), key=len)

    def executors(self) -> Iterator[RankExecutor]:
        """The executors of all plans, for each rank of this process."""
        return (executor for each in self._all for executor in each.executors.values())

    def constants(self) -> Iterator[Tensor]:
        """Tensors of elsewhere that the plans read."""
        return (tensor for each in self._all for tensor in each.captured.constants.values())

    def renew(self) -> None:
        """Run the current variant by new threads and groups, after a step has failed. Every process must call it."""
        variant, setting = self.current, self.setting
        close_all(variant.executors)
        constants = variant.captured.constants
        executors = build(setting, constants, variant.compiled, self.optimizers)
        self.current = replace(variant, executors=executors)
        self._all[variant.number] = self.current

    def close(self) -> None:
        """End the threads of all."""
        for variant in self._all:
            close_all(variant.executors)

    def _other(self, batch: Any, why: str, enter: Callable[[str], object]) -> Variant:
        """The variant for a batch: one that is there, or a new one; `why` not the current one, in words."""
        for variant in self._all:
            if variant.serves(batch):
                enter(variant.name)
                return variant
        whole = WholeBatch(batch).nest
        shapes = _shapes(describe_batch(whole))
        values = all(each.guards.changed() for each in self._all)
        if values and self._for_values + 1 == MOST:
            raise UserError(
                f"{why}. The step reads it, and was planned for {MOST} values of Python already, the most that there "
                "can be. Pass changing values in the batch, as a tensor; values that were planned before still run, "
                "also with batches of other shapes"
            )
        if not values and len(self._all) - self._for_values == MOST:
            raise BatchError(
                f"the batch ({shapes}) has another shape. The step was planned for {MOST} shapes already, the most "
                "that there can be; pad batches to a few lengths"
            )
        self._step.follow(self.current.guards.numbers_changed())
        batch = whole_batch_of(batch)  # of which global tensors say how they are laid out
        batch = whole if isinstance(batch, RowsOfBatch) else batch
        started = time.perf_counter()
        enter(f"{shapes} (planned again, no. {len(self._all)})")
        with uncollected():
            planned = run_on_all(
                self.setting.world, "the plan", lambda: self._checked(self._plan(batch))
            )
            variant = self._build(planned)
        self._all.append(variant)
        self._for_values += values
        seconds = time.perf_counter() - started
        inputs = "".join(f"; {each} is an input from now on" for each in variant.captured.followed)
        _log.info("planned the step again (%s) in %.1f s: %s%s", shapes, seconds, why, inputs)
        return variant

    def _checked(self, planned: Planned) -> Planned:
        first = self._all[0].compiled
        compiled = planned[1]
        known = {node.key for node in first.graph.of_kind(Input)}
        for node in compiled.graph.of_kind(Input):
            own = node.role in ("parameter", "buffer")
            if own and node.key not in known and compiled.graph.users.get(node.value.name):
                raise UserError(
                    f"{node.key} is a {node.role} that came after the step was compiled, and the step reads it: the "
                    "program has no variable for it. Close the program, weft.release(model), and compile again with an "
                    "optimizer that has it"
                )
        check_same_layouts(compiled, lying_in(first), "this program's first plan", "compile again")
        return planned

    def _build(self, planned: Planned) -> Variant:
        self._note(planned[1])
        return variant_of(self.setting, len(self._all), planned, self.optimizers)


def variant_of(
    setting: ProgramSetting, number: int, planned: Planned, optimizers: Optimizers
) -> Variant:
    """A plan, ready to run. Every process must call it."""
    captured, compiled = planned
    executors = build(setting, captured.constants, compiled, optimizers)
    devices = {rank: setting.world.device(rank) for rank in executors}
    feeder = Feeder(captured.batch, compiled.graph, devices, setting.world.several)
    guards = Guards(captured, setting.model, optimizers)
    return Variant(number, captured, compiled, executors, feeder, guards)


def _shapes(batch: BatchSpec) -> str:
    return ", ".join(f"{leaf.key} {leaf.dtype}{list(leaf.shape)}" for leaf in batch.tensors)


def lying_in(compiled: Compiled, roles: Collection[Role] = VARIABLE_ROLES) -> LiveShardings:
    """The layouts of the variables of a plan."""
    inputs = [node for node in compiled.graph.of_kind(Input) if node.role in roles]
    found = {node.key: node.value.layout for node in inputs if node.value.layout is not None}
    return LiveShardings(found, compiled.stored, shares_of(compiled.graph))


def check_same_layouts(compiled: Compiled, given: LiveShardings, where: str, remedy: str) -> None:
    """Raise UserError, naming the first variable that a plan lays otherwise than `where` did (`given`)."""

    def text(lying: LiveShardings, key: str) -> str:
        shares = lying.shares.get(key)
        return f"{lying.layouts[key]} in {shares}" if shares else str(lying.layouts[key])

    planned = lying_in(compiled)
    for key in planned.layouts:
        if key in given.layouts and text(planned, key) != text(given, key):
            raise UserError(
                f"{key} would be laid out as {text(planned, key)}, but is laid out as {text(given, key)} for {where}; "
                f"name its layout in Strategy(parameters={{{key!r}: …}}), so that it is the same for all, or {remedy}"
            )


@final
@dataclass(frozen=True)
class Planner:
    """The parts that plans of one program have in common.

    `held`: how variables are laid out that open programs work with.
    """

    strategy: Strategy
    placement: Placement
    ranks: tuple[int, ...]
    options: Options
    held: LiveShardings

    def plan(
        self,
        step: Step,
        begin: Callable[[str], None] = lambda _: None,
        like: Compiled | None = None,
    ) -> Planned:
        """Capture a step for one shape of the batch, and compile it; needs no other process.

        Args:
            begin: is told each phase that begins.
            like: the plan for another shape, which fixes how parameters and buffers are laid out.
        """
        placements = stage_placements(self.options.stages, self.placement)
        begin("capturing")
        apart = split_parameters(self.strategy, dict(step.model.named_parameters()))
        captured = step.captured(self.placement.device_type, self.options.precision, apart)
        hints = with_leaves(strategy_hints(self.strategy, captured.graph, placements), step.leaves)
        graph, ranks, options = captured.graph, self.ranks, self.options
        held = lying_in(like, ("parameter", "buffer")) if like else self.held
        homes = like.stages.homes if like else held.homes(placements)
        hints = with_lying(hints, held, graph)
        compiled = compile_graph(graph, hints, self.placement, ranks, options, homes, begin, like)
        where = "another program that is open"
        check_same_layouts(compiled, self.held, where, "close the other program")
        return captured, compiled

    def variants(
        self, setting: ProgramSetting, step: Step, first: Planned, note: Callable[[Compiled], None]
    ) -> Variants:
        """The step for all batches, beginning with `first`, as which variables lie; `note` is told each plan."""
        return Variants(
            setting,
            first,
            step,
            lambda batch: self.plan(step.of_shape(batch), like=first[1]),
            note,
        )

    @property
    def bare(self) -> Planner:
        """The strategy without the parts of an update: clipping and its norm."""
        return replace(self, options=replace(self.options, clip_norm=None, metrics=()))


def planner_of(
    world: World,
    step: Step,
    strategy: Strategy,
    placement: Placement,
    kernels: Kernels,
    held: LiveShardings,
    metrics: Sequence[Metric] = (),
) -> Planner:
    """The planner of a step by a strategy, beside programs that are open. Every process must call it."""
    modules = (path for path, _ in step.model.named_modules(remove_duplicate=False))
    options = replace(
        options_of(strategy),
        metrics=tuple(metrics),
        modules=tuple(path for path in modules if path),
        costs=agreed_costs(world),
        own_kernels=kernels != "torch",
    )
    return Planner(strategy, placement, local_ranks(world, placement), options, held)


def agreed_costs(world: World) -> Costs | None:
    """The costs of the first rank's machine, on all ranks; None for usual devices. Every process must call it.

    Only links between hosts are measured. Raises UserError on all ranks, when the first cannot read its measured costs.
    """

    def measured() -> str:
        if 0 not in world.ranks:
            return ""
        device = world.device(world.ranks[0])
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        found = costs_at_hand(
            *(world.device_type, world.size, world.processes, torch.get_num_threads(), name)
        )
        if isinstance(found, MeasuredCosts):
            return json.dumps({"measured": to_json(found.measured), "stands_in": found.stands_in})
        return json.dumps({"device": name} if found is not None else {})

    content = json.loads(gathered(world, "the costs of the machine", measured)[0])
    costs: Costs | None = None
    if "measured" in content:
        found = from_json(content["measured"], "the first rank's costs")
        costs = MeasuredCosts(found, default_device(world.device_type), content["stands_in"])
    elif content:
        costs = catalogue_costs(content["device"], world.size)
    return behind_links(costs, world.links())
