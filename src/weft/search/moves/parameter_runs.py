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
from typing import final

from weft.ir.logical import Input
from weft.patterns import around, first_match
from weft.planning.stored_step import StoredStep
from weft.search.moves.layouts import choices_of, said_of
from weft.search.moves.sequences import StrategyMove
from weft.search.steps.parts import ForwardCalls
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs

# Runs of which layouts are tried, those that save most.
MOST = 32


@final
@dataclass(frozen=True)
class Weight:
    """A parameter, with the number of the unit that it is in.

    `saved` has the bytes of its gradient beyond those that go in and out of its module; 0 with one dimension, since
    biases and norms lie as is best for the weights around them.
    """

    key: str
    shape: tuple[int, ...]
    unit: int
    saved: int


def weights_of(step: StoredStep, calls: ForwardCalls, units: Sequence[str]) -> list[Weight]:
    """The parameters of a step that lie in units: paths of modules, in order.

    Those of recurrent layers are left out, which lie as they were captured.
    """
    number, found = {path: place for place, path in enumerate(units)}, []
    for node in step.graph.of_kind(Input):
        if node.key in step.recurrent or node.role != "parameter" or not node.value.shape:
            continue
        place = next((number[path] for path in around(node.key) if path in number), None)
        if place is not None:
            own = calls.inside.get(node.key.rpartition(".")[0], frozenset())
            several = len(node.value.shape) > 1
            saved = calls.sizes[node.value.name] - calls.moved(own) if several else 0
            found.append(Weight(node.key, tuple(node.value.shape), place, saved))
    return found


@final
@dataclass(frozen=True)
class WeightRun:
    """Parameters of one name and as many dimensions, or all, from one unit on or up to one: two at least."""

    weights: tuple[Weight, ...]

    @property
    def saved(self) -> int:
        """Bytes of their gradients beyond those that go in and out of their modules."""
        return sum(each.saved for each in self.weights)

    def moves(self, grid: Sequence[int], fixed: Mapping[str, SBPs]) -> Iterator[StrategyMove]:
        """Every layout of all of them on a grid of ranks, beside the layouts that are fixed."""
        least = [min(sizes) for sizes in zip(*(each.shape for each in self.weights), strict=False)]
        for sbps in product(*(choices_of(least, parts) for parts in grid)):
            name = f"{self.weights[0].key} to {self.weights[-1].key} {', '.join(map(str, sbps))}"
            laid = {each.key: said_of(sbps) for each in self.weights}
            yield StrategyMove(name, partial(_laid_together, laid, fixed), float(self.saved))


def runs_of(weights: Sequence[Weight], fixed: Mapping[str, SBPs]) -> tuple[WeightRun, ...]:
    """The runs that save most, in this order, without parameters whose layouts are fixed."""
    alike: dict[tuple[str, int], list[Weight]] = defaultdict(list)
    for each in weights:
        if first_match(fixed, each.key) is None:
            alike["any", 0].append(each)
            if len(each.shape) > 1:
                alike[each.key.rpartition(".")[2], len(each.shape)].append(each)
    found = dict[tuple[Weight, ...], WeightRun]()
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
    rest = {name: said for name, said in held.items() if name not in laid}
    return replace(strategy, parameters={**fixed, **laid, **rest})
