"""Moves of layouts along a model: all parameters, or those alike, from one place on or up to it, lie alike.

So the wide layers at the end of a net are split by channels together, where a single one would only be laid anew. Runs
come first whose gradients are larger than what goes in and out of their layers, which travels instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, final

from weft.ir.logical import Input
from weft.layout import SBP, Placement, broadcast, split
from weft.patterns import around, first_match
from weft.planning.stored_step import StoredStep
from weft.search.moves.sequences import StrategyMove
from weft.search.steps.ways_back import ForwardCalls
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs

# Runs of which layouts are tried, those that save most.
MOST = 32


@final
@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        key: its name.
        shape: its size along each dimension.
        unit: the number of the unit that it is in.
        saved: bytes of its gradient beyond those that go in and out of its module; 0 with one dimension, since biases
            and norms lie as is best for the weights around them.
    """

    key: str
    shape: tuple[int, ...]
    unit: int
    saved: int


def weights_of(step: StoredStep, calls: ForwardCalls, units: Sequence[str]) -> list[Weight]:
    """The parameters of a step that lie in units, but for those of recurrent layers, which lie as they were captured.

    Args:
        step: as it was captured.
        calls: its forward calls.
        units: paths of modules, in order.
    """
    number = {path: place for place, path in enumerate(units)}
    found = []
    for node in step.graph.of_kind(Input):
        if node.key in step.recurrent:
            continue
        place = next((number[path] for path in around(node.key) if path in number), None)
        if node.role == "parameter" and node.value.shape and place is not None:
            own = calls.inside.get(node.key.rpartition(".")[0], frozenset())
            several = len(node.value.shape) > 1
            saved = calls.sizes[node.value.name] - calls.moved(own) if several else 0
            found.append(Weight(node.key, tuple(node.value.shape), place, saved))
    return found


@final
@dataclass(frozen=True)
class WeightRun:
    """Parameters of one name and as many dimensions, or all, from one unit on or up to one.

    Attributes:
        weights: of it, two at least.
    """

    weights: tuple[Weight, ...]

    @property
    def saved(self) -> int:
        """Bytes of their gradients beyond those that go in and out of their modules."""
        return sum(each.saved for each in self.weights)

    def moves(self, grid: Sequence[int], fixed: Mapping[str, SBPs]) -> Iterator[StrategyMove]:
        """Every layout of all of them.

        Args:
            grid: the number of ranks along each axis.
            fixed: layouts of parameters that hold for every strategy.
        """
        shapes = [each.shape for each in self.weights]
        least = [min(sizes) for sizes in zip(*shapes, strict=False)]
        choices: Iterator[list[SBP]] = (
            [broadcast, *(split(d) for d, size in enumerate(least) if size >= parts > 1)]
            for parts in grid
        )
        for sbps in product(*choices):
            said: SBPs = sbps[0] if len(sbps) == 1 else tuple(sbps)
            name = f"{self.weights[0].key} to {self.weights[-1].key} {', '.join(map(str, sbps))}"
            laid = {each.key: said for each in self.weights}
            yield StrategyMove(name, partial(_laid_together, laid, fixed))


def runs_of(weights: Sequence[Weight], fixed: Mapping[str, SBPs]) -> tuple[WeightRun, ...]:
    """The runs that save most, in this order.

    Args:
        weights: of the model.
        fixed: layouts of parameters that hold for every strategy: those are in no run.
    """
    alike: dict[tuple[str, int], list[Weight]] = defaultdict(list)
    for each in weights:
        if first_match(fixed, each.key) is None:
            alike["any", 0].append(each)
            if len(each.shape) > 1:
                alike[each.key.rpartition(".")[2], len(each.shape)].append(each)
    found: dict[tuple[Weight, ...], WeightRun] = {}
    for own in alike.values():
        for place in sorted({each.unit for each in own}):
            for run in (w for w in own if w.unit >= place), (w for w in own if w.unit <= place):
                several = tuple(run)
                if len(several) > 1:
                    found[several] = WeightRun(several)
    return tuple(sorted(found.values(), key=lambda run: -run.saved)[:MOST])


def _laid_together(
    laid: Mapping[str, SBPs], fixed: Mapping[str, SBPs], strategy: Strategy
) -> Strategy:
    """Behind what is fixed, before all other patterns, of which the first counts; as it is where nothing changes."""
    held = strategy.parameters
    first = {key: first_match(held, key) for key in laid}
    if all(pattern and held[pattern] == laid[key] for key, pattern in first.items()):
        return strategy
    rest = {name: said for name, said in strategy.parameters.items() if name not in laid}
    changed: dict[str, Any] = {**fixed, **laid, **rest}
    return replace(strategy, parameters=changed)


def row_count(placement: Placement) -> int:
    """The number of rows of a grid along its first axis of several ranks; 1 without any."""
    return placement.shape[_axis(placement)]


def some_rows(placement: Placement, rows: Sequence[int]) -> Placement:
    """The ranks of some rows.

    Args:
        placement: the grid.
        rows: their numbers; one at least.
    """
    axis = _axis(placement)
    inner = prod(placement.shape[axis + 1 :])
    ranks = [placement.ranks[row * inner + place] for row in rows for place in range(inner)]
    return _like(placement, axis, len(rows), ranks)


def joined_rows(one: Placement, other: Placement) -> Placement | None:
    """The ranks of both, in their order; None where their rows are not of the same shape."""
    axis = min(_axis(one), _axis(other))
    if one.axes != other.axes or one.shape[axis + 1 :] != other.shape[axis + 1 :]:
        return None
    blocks = _blocks(one, axis) | _blocks(other, axis)
    return _like(one, axis, len(blocks), [rank for block in sorted(blocks) for rank in block])


def _blocks(placement: Placement, axis: int) -> set[tuple[int, ...]]:
    """The ranks of each row."""
    inner, ranks = prod(placement.shape[axis + 1 :]), placement.ranks
    return {ranks[place : place + inner] for place in range(0, len(ranks), inner)}


def _axis(placement: Placement) -> int:
    return next((axis for axis, size in enumerate(placement.shape) if size > 1), 0)


def _like(placement: Placement, axis: int, count: int, ranks: Sequence[int]) -> Placement:
    shape = (*placement.shape[:axis], count, *placement.shape[axis + 1 :])
    return Placement(placement.device_type, shape, tuple(ranks))
