"""The additive part of a plan: the sum of calls and boxing in its grid and stages, and the least sum for any layouts.

This part of a step's seconds depends on layouts alone: it leaves out overlap, bubbles and sharded storage. Its
least is exact where tables stay small, so it says how far the layouts of the best are from any others, and gives those
that sum to the least as a place from which to search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.layouts.least import LeastSum, LeastSums
from weft.compiler.stages.lay_out import Deduced
from weft.errors import RuleError
from weft.hardware.costs import CostModel, carried, seconds_model
from weft.ir.logical import Call, Input, LogicalGraph
from weft.patterns import matches
from weft.search.candidate import fixed_first
from weft.search.steps.facts import StepFacts
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs


@final
@dataclass(frozen=True)
class AdditivePart:
    """The sum of calls and boxing of a plan.

    Attributes:
        cost: of the strategy's layouts: seconds of all stages together, at the rates of large calls and exchanges.
        least: the lowest sum for any layouts.
        cheapest: the strategy with the cheapest layouts found.
    """

    cost: float
    least: float
    cheapest: Strategy = field(repr=False)

    @property
    def gap(self) -> float:
        """The part by which other layouts can be cheaper at most."""
        return max(0.0, 1 - self.least / self.cost) if self.cost else 0.0

    def __str__(self) -> str:
        """The distance of the layouts from the cheapest."""
        return f"others in this grid save {self.gap:.2%} of calls and boxing at most"


def additive_part(
    facts: StepFacts, strategy: Strategy, deduced: Sequence[Deduced]
) -> AdditivePart | None:
    """The additive part of a strategy's plan; None if unknown.

    The part is unknown on one rank, on grids with three axes of several ranks, and where an op has no rule for the
    whole grid.
    """
    sums: dict[tuple[tuple[int, ...], CostModel], LeastSums] = {}
    found: list[LeastSum] = []
    cost = least = 0.0
    dtype = "bfloat16" if facts.narrowed < 1 else "float32"
    held = frozenset(_held(facts.step.graph, facts.base))
    for stage in deduced:
        placement = stage.placement
        if len(placement.ranks) < 2:
            return None
        model = seconds_model(facts.machine.costs, placement.ranks, dtype)
        # Of unlike devices or links each has its own.
        same = sums.setdefault((placement.shape, model), LeastSums(placement.shape, model))
        fixed = held.union(_hints(stage.graph)) if facts.base.activations else held
        try:
            one = same.of(stage.graph, stage.hints, placement, stage.assignment, fixed)
        except RuleError:  # of some op no signatures can be said
            return None
        if one is None:
            return None
        found.append(one)
        second = carried(facts.machine.costs, placement.ranks)
        cost, least = cost + one.cost / second, least + one.bound / second
    stored = {key for each in deduced for key in each.hints.stored}
    return AdditivePart(cost, least, _with_cheapest(facts, strategy, found, stored | held))


def _held(graph: LogicalGraph, base: Strategy) -> Iterator[str]:
    """Names of what the user fixed: inputs, hints in the code, and calls."""
    yield from base.signatures
    yield from _hints(graph)
    for node in graph.of_kind(Input):
        patterns = base.parameters if node.role == "parameter" else base.batch
        if node.role in ("parameter", "batch") and any(matches(one, node.key) for one in patterns):
            yield node.key


def _hints(graph: LogicalGraph) -> Iterator[str]:
    return (node.makes[0].name for node in graph.of_kind(Call) if node.hint is not None)


def _with_cheapest(
    facts: StepFacts, strategy: Strategy, found: Sequence[LeastSum], held: Collection[str]
) -> Strategy:
    """The strategy with the cheapest layouts: every call's signature, parameters and leaves where they differ."""
    calls = {
        node.makes[0].name
        for node in facts.step.graph.of_kind(Call)
        if node.makes and node.hint is None
    }
    roles = {node.key: node.role for node in facts.step.graph.of_kind(Input)}
    signatures: dict[str, str | tuple[str, ...]] = {}
    inputs: dict[str, dict[str, SBPs]] = {"parameter": {}, "batch": {}}
    for one in found:
        for name, every in one.cheapest.items():
            if name in calls:
                texts = tuple(map(str, every))
                signatures[name] = texts[0] if len(texts) == 1 else texts
            elif roles.get(name) in inputs and name in one.differing and name not in held:
                sbps = tuple(each.operands[0] for each in every)
                inputs[roles[name]][name] = sbps[0] if len(sbps) == 1 else sbps
    base = facts.base
    return replace(
        strategy,
        signatures={**dict(sorted(signatures.items())), **base.signatures},
        parameters=fixed_first(
            base.parameters, fixed_first(inputs["parameter"], strategy.parameters)
        ),
        batch=fixed_first(base.batch, fixed_first(inputs["batch"], strategy.batch)),
    )
