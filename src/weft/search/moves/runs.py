"""Moves of layouts along a model: all weights of one kind from one place on, or up to it, lie alike.

So the wide layers at the end of a net are split by channels together, where a single one would only be laid anew. Runs
come first whose gradients are larger than what goes in and out of their layers, which travels instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, final

from weft.ir.logical import Input, LogicalGraph
from weft.layout import broadcast, split
from weft.patterns import first_match
from weft.search.moves.strategy_move import StrategyMove
from weft.search.steps.forward_calls import ForwardCalls
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs

# Runs of which layouts are tried, those that save most.
MOST = 32


@final
@dataclass(frozen=True)
class Weight:
    """A parameter of several dimensions.

    Attributes:
        key: its name.
        shape: its size along each dimension.
        unit: the number of the unit that it is in.
        saved: bytes of its gradient beyond those that go in and out of its module.
    """

    key: str
    shape: tuple[int, ...]
    unit: int
    saved: int


def weights_of(graph: LogicalGraph, calls: ForwardCalls, units: Sequence[str]) -> list[Weight]:
    """The weights of a step that lie in units.

    Args:
        graph: the step.
        calls: its forward calls.
        units: paths of modules, in order.
    """
    number = {path: place for place, path in enumerate(units)}
    found = []
    for node in graph.of_kind(Input):
        place = next((number[path] for path in _around(node.key) if path in number), None)
        if node.role == "parameter" and len(node.value.shape) > 1 and place is not None:
            own = calls.inside.get(node.key.rpartition(".")[0], frozenset())
            saved = calls.sizes[node.value.name] - calls.moved(own)
            found.append(Weight(node.key, tuple(node.value.shape), place, saved))
    return found


def run_moves(
    weights: Sequence[Weight], grid: Sequence[int], base: Strategy
) -> tuple[StrategyMove, ...]:
    """Every layout of the runs that save most, those of the most first.

    Args:
        weights: of the model.
        grid: the number of ranks along each axis.
        base: entries that hold for every strategy: its parameters are in no run.
    """
    free = [each for each in weights if first_match(base.parameters, each.key) is None]
    runs = {tuple(each.key for each in run): run for run in _runs(free)}
    best = sorted(runs.values(), key=lambda run: -sum(each.saved for each in run))[:MOST]
    return tuple(move for run in best for move in _of_run(run, grid, base))


def _runs(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Of each kind, by name and dimensions, those in all units from one on, or up to one; two of them at least."""
    kinds: dict[tuple[str, int], list[Weight]] = defaultdict(list)
    for each in weights:
        kinds[each.key.rpartition(".")[2], len(each.shape)].append(each)
    for own in kinds.values():
        for place in sorted({each.unit for each in own}):
            runs = [w for w in own if w.unit >= place], [w for w in own if w.unit <= place]
            yield from (run for run in runs if len(run) > 1)


def _of_run(run: Sequence[Weight], grid: Sequence[int], base: Strategy) -> Iterator[StrategyMove]:
    least = [min(sizes) for sizes in zip(*(each.shape for each in run), strict=True)]
    choices = [
        [broadcast, *(split(d) for d, size in enumerate(least) if size >= parts > 1)]
        for parts in grid
    ]
    for sbps in product(*choices):
        said: SBPs = sbps[0] if len(sbps) == 1 else sbps
        name = f"{run[0].key} to {run[-1].key} {', '.join(map(str, sbps))}"
        laid = {each.key: said for each in run}
        yield StrategyMove(name, partial(_laid, laid, base.parameters))


def _laid(
    laid: Mapping[str, SBPs], fixed: Mapping[str, SBPs], strategy: Strategy
) -> Strategy:
    """Behind what is fixed, before all other patterns, of which the first counts."""
    rest = {name: said for name, said in strategy.parameters.items() if name not in laid}
    changed: dict[str, Any] = {**fixed, **laid, **rest}
    return replace(strategy, parameters=changed)


def _around(key: str) -> Iterator[str]:
    """The modules around a parameter."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
