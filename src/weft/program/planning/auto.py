"""The strategy of a program that is searched: by the first rank, with the costs that plans are made with, for all."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.errors import RankFailure, StrategyError, UserError, wrong
from weft.hardware import default_device
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.layout import Placement
from weft.planning.machine import Machine
from weft.planning.progress import uncollected
from weft.program.agreement import TrialFailure, gathered, run_on_all, unless_failed
from weft.program.data.feed import layouts_on, shares_of
from weft.program.live.ownership import LiveShardings, live_shardings, named_variables
from weft.program.live.variables import add_loss_scale, add_main_parameters
from weft.program.planning.build import close_all
from weft.program.planning.step import Step
from weft.program.planning.variants import Planned, Variant, agreed_costs, planner_of, variant_of
from weft.program.setting import ProgramSetting
from weft.runtime.compiled.choice import Kernels
from weft.runtime.memory.heap import give_back
from weft.runtime.memory.state import Variables, local_part
from weft.runtime.profiling.call_times import finish
from weft.runtime.world.world import World
from weft.search.budget import Auto, Budget
from weft.search.evaluator import Evaluator
from weft.search.measures import Measures
from weft.search.result import worth_running
from weft.search.search import search, with_memory_limit
from weft.search.why_not import split_parameters
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy
from weft.tensor import GlobalTensor
from weft.tensor.dispatch.interleaved import in_shares
from weft.units import Seconds

# A strategy that a search found, and the ranks of the placement in its grid.
PlacedStrategy: TypeAlias = tuple[Strategy, Placement]

AUTO = "auto"


def split_strategy_argument(
    strategy: Strategy | Auto | str | None, batch: object
) -> tuple[Strategy | None, Auto | None]:
    """The strategy that `strategy=` fixes, and the search that it asks for.

    Raises UserError for a wrong argument, and for a search where each process brings rows of the batch.
    """
    if isinstance(strategy, str) and strategy != AUTO:
        raise wrong(
            "strategy=", f'a weft.Strategy, "{AUTO}" or a weft.Auto', strategy, StrategyError
        )
    auto = Auto() if isinstance(strategy, str) else strategy
    if not isinstance(auto, Auto):
        return auto, None
    if batch == "local":
        raise UserError(
            'strategy="auto" with batch="local" is not supported yet: the rows of each process depend on the strategy; '
            "give whole batches, or a strategy that says how the batch is split"
        )
    measure = auto.measure
    if isinstance(measure, bool) or not isinstance(measure, int) or measure < 0:
        raise wrong(
            "weft.Auto: measure", "the number of strategies to run, from 0", measure, StrategyError
        )
    if auto.fixed is not None and not isinstance(auto.fixed, Strategy):
        expected = "a weft.Strategy with the entries that hold for all"
        raise wrong("weft.Auto: fixed", expected, auto.fixed, StrategyError)
    return Strategy() if auto.fixed is None else auto.fixed, auto


def choose_strategy(
    world: World, step: Step, placement: Placement, auto: Auto, spare: int = 0
) -> list[PlacedStrategy]:
    """Search on the first rank; the best strategies and their placements, on all ranks. Every process must call it.

    Where the search is to measure, there are several strategies, the fastest by simulation first, and `spare` more.

    Raises:
        UserError: on all ranks, when no strategy fits, or an argument of the search cannot be.
        StrategyError: on all ranks, when a fixed stage is on a rank that is not in the placement.
    """
    Budget.of(auto.seconds, auto.moves)
    if auto.moves is None and auto.seconds > world.timeout / 2:
        raise StrategyError(
            f"strategy=: the other ranks wait {world.timeout:g} s for the search at most, found "
            f"seconds={auto.seconds!r}; give at most {world.timeout / 2:g}, or worlds of a larger timeout"
        )
    places = {rank: place for place, rank in enumerate(placement.ranks)}
    costs = agreed_costs(world) or default_device(world.device_type)
    machine = Machine(costs, costs, len(placement.ranks), placement.device_type)

    def found() -> str:
        if 0 not in world.ranks:
            return ""
        given = (
            () if auto.fixed is None or isinstance(auto.fixed.stages, int) else auto.fixed.stages
        )
        for number, stage in enumerate(given):
            for rank in stage.placement.ranks:
                if rank not in places:
                    raise StrategyError(
                        f"stage {number} of fixed= runs on rank {rank}, which is not in the placement {placement}; "
                        "give stages ranks of the placement"
                    )
        fixed = Strategy() if auto.fixed is None else _with_ranks(auto.fixed, places)
        stored = step.stored(placement.device_type, fixed)
        result = search(
            stored,
            machine,
            seconds=auto.seconds,
            fixed=fixed,
            memory_limit=auto.memory_limit,
            seed=auto.seed,
            moves=auto.moves,
            every_rank=True,
        )
        own = with_memory_limit(machine, auto.memory_limit)
        evaluator, limit = Evaluator(stored, own, tuple(range(own.devices))), own.least_limit

        def fits(strategy: Strategy) -> bool:
            answer = evaluator.of(strategy)
            return isinstance(answer, Measures) and (limit is None or answer.memory <= limit)

        count, split = max(auto.measure, 1) + spare, partial(split_parameters, stored.graph)
        wanted = worth_running(result.tried, count, fixed, fits, split)
        return json.dumps([each.to_text() for each in wanted])

    # A search names the ranks of stages by their places in the placement.
    ranks, placed = dict(enumerate(placement.ranks)), []
    for text in json.loads(gathered(world, "the search for a strategy", found)[0]):
        strategy = Strategy.from_text(text, "the strategy that was searched")
        grid = tuple(strategy.grid) or placement.shape
        own = Placement(placement.device_type, grid, placement.ranks)
        placed.append((_with_ranks(strategy, ranks), own))
    return placed


def _with_ranks(strategy: Strategy, ranks: Mapping[int, int]) -> Strategy:
    """A strategy with other ranks for those that its stages name."""
    if isinstance(strategy.stages, int):
        return strategy
    each = [(stage.patterns, stage.placement) for stage in strategy.stages]
    stages = tuple(
        Stage(patterns, Placement(x.device_type, x.shape, tuple(ranks[rank] for rank in x.ranks)))
        for patterns, x in each
    )
    return replace(strategy, stages=stages)


# So many more strategies are looked at where the model lies somewhere already.
SPARE = 12
# Steps before time counts; then as many as take so many seconds, from the least to the most.
_FIRST, _SECONDS, _LEAST, _MOST = 2, 0.5, 3, 1000
# Candidates that took at most so many times as long as the fastest run again, in so many rounds in all at most; or
# until two trials of one lie no further apart than so.
_NEAR, _ROUNDS, _CLOSE = 1.2, 5, 0.01
# A strategy that says more must be faster by so much: trials of one strategy differ by as much, run by run.
_WORTH = 0.03
# Every floating-point element of what has no values yet.
_VALUE = 0.02
_log = logging.getLogger("weft")


@final
@dataclass(frozen=True)
class Trials:
    """Trials of strategies for one step: some real steps each, on copies of the model's values.

    One candidate is in memory at a time, beside the model. A candidate that fails, as for want of memory, is left out.
    """

    world: World
    step: Step
    kernels: Kernels

    def fastest(self, candidates: Sequence[PlacedStrategy]) -> PlacedStrategy:
        """The fastest of some candidates, given in the order of their simulated times. Every process must call it.

        Candidates near the fastest run again, in reverse and back, until trials tell them apart, as other load of the
        machine must not decide. The least time of a candidate counts. Candidates are equally fast within the distance
        of a candidate's two fastest trials (median of all); then the shortest strategy wins, which a longer one must
        beat by 3 %.

        Raises:
            UserError: no candidate can be planned.
            RankFailure: all that can be planned failed, with why the first one did; or a rank died.
        """
        found: dict[int, list[Seconds]] = {}
        errors: list[UserError | TrialFailure] = []
        for number, candidate in enumerate(candidates):
            self._try(number, candidate, found, errors)
        alike, apart = _within(found, _NEAR), inf
        for turn in range(1, _ROUNDS):
            if len(alike) < 2 or apart <= _CLOSE:
                break
            for number in alike if turn % 2 == 0 else alike[::-1]:
                self._try(number, candidates[number], found, errors)
            # The distance of the two fastest trials, as a share of the fastest.
            both = [sorted(times)[:2] for times in found.values() if len(times) > 1]
            apart = median([(second - first) / first for first, second in both] or [0.0])
            alike = _within(found, 1 + apart)
        if not found:
            failure = next((each for each in errors if isinstance(each, TrialFailure)), None)
            if failure is None:
                raise errors[0]
            raise RankFailure(
                f"weft.Auto(measure=…): no candidate ran; the first failed with {failure}. Candidates run with the "
                "example batch, whose values the step must accept, and which must fit in memory beside the model; "
                "give such a batch, or measure=0, which runs none"
            )
        apart = min(apart, _NEAR - 1)
        near = _within(found, 1 + max(_WORTH, apart))
        # A strategy that the simulation prefers should be faster in trials too.
        lines = {number: len(candidates[number][0].to_text().splitlines()) for number in near}
        least = min(lines.values())
        simple = {number: found[number] for number in near if lines[number] == least}
        return candidates[_within(simple, 1 + apart)[0]]

    def lying_alike(
        self, found: Sequence[PlacedStrategy], count: int, held: LiveShardings
    ) -> list[PlacedStrategy]:
        """The first `count` strategies that lay out the model as open programs do (`held`). Every process must call it.

        Raises UserError on all ranks, when none does.
        """
        alike: list[PlacedStrategy] = []
        refused = UserError("there is none")
        for candidate in found:
            planner = planner_of(self.world, self.step, *candidate, self.kernels, held)
            try:
                run_on_all(self.world, "the plan", lambda: planner.plan(self.step))  # noqa: B023
            except UserError as error:
                refused = error
                continue
            alike.append(candidate)
            if len(alike) == count:
                break
        if not alike:
            raise UserError(
                f"strategy=: of {len(found)} strategies that the search would take none has the layouts that an open "
                f"program uses for the model: {refused}. Give program.strategy of that program, take its "
                "program.evaluation, or close it"
            )
        return alike

    def _try(
        self,
        number: int,
        candidate: PlacedStrategy,
        found: dict[int, list[Seconds]],
        errors: list[UserError | TrialFailure],
    ) -> None:
        try:
            seconds = self.seconds(*candidate)
        except (UserError, TrialFailure) as error:
            _log.info("candidate %d is left out: %s", number + 1, error)
            # The frames of the error hold the candidate's memory.
            errors.append(error.with_traceback(None))
            found.pop(number, None)
            return
        _log.info("candidate %d: %.3f ms", number + 1, 1e3 * seconds)
        found.setdefault(number, []).append(seconds)

    def seconds(self, strategy: Strategy, placement: Placement) -> Seconds:
        """Seconds of a step on the slowest rank, the median of some; the same on all. Every process must call it.

        Raises UserError or TrialFailure on all ranks, which can continue, if it cannot be planned, or failed on one.
        """
        setting, planned = self._laid(strategy, placement)
        variant = variant_of(setting, 0, planned, self.step.optimizers)
        try:
            return self._timed(setting, variant)
        finally:
            close_all(variant.executors)
            # The objects of a candidate form reference cycles, and the next one needs their memory.
            del setting, planned, variant
            gc.collect()
            give_back()

    def _laid(self, strategy: Strategy, placement: Placement) -> tuple[ProgramSetting, Planned]:
        step, world = self.step, self.world
        held = live_shardings(step.model, world)
        planner = planner_of(world, step, strategy, placement, self.kernels, held)
        with uncollected():
            planned = run_on_all(world, "the plan", lambda: planner.plan(step))
        graph = planned[1].graph
        variables = unless_failed(
            world, "values", lambda: {rank: self._variables(graph, rank) for rank in planner.ranks}
        )
        setting = ProgramSetting(
            step.model, world, placement, planner.options, variables, 0, strategy, self.kernels
        )
        add_loss_scale(setting, graph)
        add_main_parameters(variables, graph)
        return setting, planned

    def _variables(self, graph: LogicalGraph, rank: int) -> Variables:
        own, shares = named_variables(self.step.model), shares_of(graph)
        nodes: Mapping[str, Input] = {node.key: node for node in graph.of_kind(Input)}
        device, found = self.world.device(rank), {}
        for key, layout in layouts_on(graph, rank, "parameter", "buffer").items():
            value = nodes[key].value
            dtype = getattr(torch, value.dtype)
            whole = own.get(key)
            if whole is None or isinstance(whole, GlobalTensor) or whole.is_meta:
                whole = torch.empty(value.shape, dtype=dtype, device="meta")
            part = local_part(in_shares(whole.detach(), shares.get(key)), layout, rank)
            if part.is_meta:  # equal values
                filled: Any = _VALUE if dtype.is_floating_point or dtype.is_complex else 0
                found[key] = torch.full(part.shape, filled, dtype=dtype, device=device)
            else:
                found[key] = part.to(device, dtype, copy=True).contiguous()
        return Variables(found)

    def _timed(self, setting: ProgramSetting, variant: Variant) -> Seconds:
        """Seconds of a step, after some whose time only says how many steps are to count."""

        def valued(leaf: Tensor) -> Tensor:
            return torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf

        def seconds(number: int) -> float:
            """Until the results of a step are there."""
            begin = time.perf_counter()
            results, _ = variant.step(setting, number, feeds, True, None)
            for leaf in tree_leaves(results):
                if isinstance(leaf, Tensor):
                    finish(leaf.device)()
            return time.perf_counter() - begin

        feeds, _ = variant.feeder.feeds(tree_map_only(Tensor, valued, self.step.example_batch))

        def slowest(numbers: Iterable[int]) -> Seconds:
            took = unless_failed(
                self.world,
                "steps",
                lambda: [seconds(each) for each in numbers],
            )
            texts = gathered(self.world, "the time of steps", lambda: json.dumps(took))
            return Seconds(max(median(json.loads(text)) for text in texts))

        first = slowest(range(_FIRST))
        count = max(_LEAST, min(_MOST, round(_SECONDS / max(first, 1e-6))))
        return slowest(range(_FIRST, _FIRST + count))


def _within(found: Mapping[int, Sequence[Seconds]], times: float) -> list[int]:
    least = {number: min(taken) for number, taken in found.items()}
    most = times * min(least.values(), default=0.0)
    return [number for number in sorted(least) if least[number] <= most]
