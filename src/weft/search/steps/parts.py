"""The parts of a model that may have ranks of their own, with what they compute, hold and exchange with the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from weft.hardware import CostModel
from weft.ir.logical import Input, LogicalGraph
from weft.search.steps.repeated import Blocks
from weft.search.steps.ways_back import ForwardCalls, forward_calls_of
from weft.units import Bytes

# A part that holds and does so little of all is in no way a place of its own.
_SMALL = 0.01
# Up to the end of the first numbers of a path: "stages.2.5" of "stages.2.5.body.0".
_NUMBERED = re.compile(r".*?\.\d+(\.\d+)*(?=\.|$)")


@final
@dataclass(frozen=True)
class ModelPart:
    """Some modules of a model.

    Attributes:
        patterns: of their paths.
        first: the number of its first forward call.
        parameters: bytes of those that nothing else reads.
        work: of its calls, forward and backward, in the units of the cost model.
        moved: bytes that it reads of the rest and the rest of it, forward and backward.
    """

    patterns: tuple[str, ...]
    first: int
    parameters: Bytes
    work: float
    moved: Bytes

    def __str__(self) -> str:
        return ", ".join(self.patterns)


@final
@dataclass(frozen=True)
class Parts:
    """The parts of a model.

    Attributes:
        units: modules of which none lies in another, in the order of their first calls: each with these alone as a
            part.
        every: parts, none of them all of the model or next to nothing of it: units, what is inside and around them, the
            same place in all blocks, units with parameters of equal shapes.
        calls: that they are made of.
    """

    units: Mapping[str, ModelPart]
    every: tuple[ModelPart, ...]
    calls: ForwardCalls


def parts_of(graph: LogicalGraph, blocks: Blocks | None, model: CostModel) -> Parts:
    """The parts of a captured step's model.

    Args:
        graph: the step.
        blocks: that come again in it: each is a unit.
        model: what calls cost.
    """
    calls = forward_calls_of(graph, model)
    units = {path: _part(calls, (path,), calls.inside[path]) for path in _units(calls, blocks)}
    whole = _part(calls, (), calls.inside[""])
    found: dict[frozenset[int], ModelPart] = {}
    for patterns, own in _groups(graph, calls, units, blocks):
        if own not in found and own != calls.inside[""]:
            found[own] = _part(calls, patterns, own)
    every = (part for part in found.values() if _counts(part, whole))
    return Parts(units, tuple(every), calls)


def _counts(part: ModelPart, whole: ModelPart) -> bool:
    """True where a part is worth ranks of its own."""
    return part.parameters > _SMALL * whole.parameters or part.work > _SMALL * whole.work


def _part(calls: ForwardCalls, patterns: tuple[str, ...], own: frozenset[int]) -> ModelPart:
    work = sum(calls.work[number] for number in own)
    moved = Bytes(2 * calls.moved(own))
    return ModelPart(patterns, min(own), calls.parameters(own), work, moved)


def _units(calls: ForwardCalls, blocks: Blocks | None) -> list[str]:
    """Blocks, what else is numbered, and modules that are not; none around another."""
    found = {_unit(path, blocks) for path in calls.inside if path}
    around = {path for path in found if any(one.startswith(f"{path}.") for one in found)}
    return sorted(found - around, key=lambda path: min(calls.inside[path]))


def _unit(path: str, blocks: Blocks | None) -> str:
    number = blocks.of(path) if blocks is not None else None
    if number is not None and blocks is not None:
        return blocks.path(number)
    numbered = _NUMBERED.match(path)
    return numbered.group() if numbered else path


def _groups(
    graph: LogicalGraph, calls: ForwardCalls, units: Collection[str], blocks: Blocks | None
) -> Iterator[tuple[tuple[str, ...], frozenset[int]]]:
    """Patterns of modules, and their calls; of patterns for the same calls, the outermost first."""
    for path in sorted(calls.inside, key=lambda path: path.count(".")):
        if path:
            yield (path,), calls.inside[path]
    places: dict[str, set[int]] = defaultdict(set)
    for path, own in calls.inside.items():
        number = blocks.of(path) if blocks is not None else None
        if number is not None and blocks is not None and path != blocks.path(number):
            rest = path.removeprefix(blocks.path(number))
            places[f"{blocks.prefix}.*{rest}"] |= own
    yield from (((pattern,), frozenset(own)) for pattern, own in places.items())
    for alike in _alike(graph, units):
        yield alike, frozenset[int]().union(*(calls.inside[path] for path in alike))


def _alike(graph: LogicalGraph, units: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Units with parameters of equal shapes, such as the tables of two languages."""
    shapes: dict[str, list[tuple[int, ...]]] = {path: [] for path in units}
    for node in graph.of_kind(Input):
        own = [path for path in shapes if node.key.startswith(f"{path}.")]
        if node.role == "parameter" and own:
            shapes[own[0]].append(tuple(node.value.shape))
    same: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    for path, held in shapes.items():
        if held:
            same[tuple(sorted(held))].append(path)
    yield from (tuple(paths) for paths in same.values() if len(paths) > 1)
