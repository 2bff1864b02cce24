"""The strategy of a program that is searched: by the first rank, with the costs that plans are made with, for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from weft.errors import StrategyError, UserError, wrong
from weft.hardware import default_device
from weft.hardware.costs import Costs
from weft.hardware.measured_costs import MeasuredCosts, from_json, to_json
from weft.hardware.planning_costs import behind_links, catalogue_costs, costs_at_hand
from weft.layout import Placement
from weft.planning.machine import Machine
from weft.program.agreement import gathered
from weft.program.planning.step import Step
from weft.runtime.world.world import World
from weft.search.budget import Auto, Budget
from weft.search.evaluator import Evaluator
from weft.search.measures import Measures
from weft.search.result import worth_running
from weft.search.search import limited, search
from weft.search.why_not import split_parameters
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy

# A strategy that a search found, and the ranks of the placement in its grid.
PlacedStrategy: TypeAlias = tuple[Strategy, Placement]

AUTO = "auto"


def asked_of(
    strategy: Strategy | Auto | str | None, batch: object
) -> tuple[Strategy | None, Auto | None]:
    """The strategy that `strategy=` fixes, and the search that it asks for, if it asks for one.

    Raises:
        StrategyError: it is another text.
        UserError: a search beside batches of rows of each process.
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
            'strategy="auto" with batch="local" is not supported yet: the rows of each process hang on the strategy; '
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


def chosen(
    world: World, step: Step, placement: Placement, auto: Auto, spare: int = 0
) -> list[PlacedStrategy]:
    """The strategy that a search finds, and the ranks of a placement in its grid. Every process must call it.

    Where the search is to measure, as many as it says, not all of one kind, the quickest by simulation first.

    Args:
        world: of all ranks.
        step: that is compiled.
        placement: the ranks, all of which take part, in any grid.
        auto: the search.
        spare: so many more strategies are returned, as far as there are.

    Raises:
        UserError: on all ranks, when no strategy fits, or an argument of the search is none.
        StrategyError: on all ranks, when a fixed stage is on a rank that is not in the placement.
    """
    Budget.of(auto.seconds, auto.moves)
    if auto.moves is None and auto.seconds > world.timeout / 2:
        raise StrategyError(
            f"strategy=: the other ranks wait {world.timeout:g} s for the search at most, found "
            f"seconds={auto.seconds!r}; give at most {world.timeout / 2:g}, or worlds of a larger timeout"
        )
    costs = agreed_costs(world) or default_device(world.device_type)
    machine = Machine(costs, costs, len(placement.ranks), placement.device_type)

    def found() -> str:
        if 0 not in world.ranks:
            return ""
        fixed = Strategy() if auto.fixed is None else _by_places(auto.fixed, placement)
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
        own = limited(machine, auto.memory_limit)
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


def _by_places(fixed: Strategy, placement: Placement) -> Strategy:
    """Entries that the user fixed, with the ranks of stages by their places in the placement.

    Raises:
        StrategyError: a stage is on a rank that is not in it.
    """
    places = {rank: place for place, rank in enumerate(placement.ranks)}
    for number, stage in enumerate(() if isinstance(fixed.stages, int) else fixed.stages):
        for rank in stage.placement.ranks:
            if rank not in places:
                raise StrategyError(
                    f"stage {number} of fixed= runs on rank {rank}, which is not in the placement {placement}; give "
                    "stages ranks of the placement"
                )
    return _with_ranks(fixed, places)


def _with_ranks(strategy: Strategy, ranks: Mapping[int, int]) -> Strategy:
    """A strategy with other ranks for those that its stages name."""
    if isinstance(strategy.stages, int):
        return strategy
    stages = []
    for stage in strategy.stages:
        own = stage.placement
        found = Placement(own.device_type, own.shape, tuple(ranks[rank] for rank in own.ranks))
        stages.append(Stage(stage.patterns, found))
    return replace(strategy, stages=tuple(stages))


def agreed_costs(world: World) -> Costs | None:
    """The costs of the first rank's machine, on all ranks; None for usual devices. Every process must call it.

    Nothing is measured but the links between several hosts, to which the kinds that are nearest stand in.

    Raises:
        UserError: on all ranks, when the first one cannot read what was measured there.
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
