"""The parts of a model that may have ranks of their own, with what they compute, hold and exchange with the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from weft.compiler.stages.balance import call_cost
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph
from weft.ops import flops
from weft.patterns import around
from weft.search.steps.linears import forward
from weft.search.steps.repeated import Blocks, starred_path, unit_of
from weft.search.tuning import WORTH
from weft.units import Bytes

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
        units: modules of which none is in another, in the order of their first calls: each with these alone as a
            part.
        every: parts, none of them all of the model or next to nothing of it: units, what is inside and around them, the
            same place in all blocks, units with parameters of equal shapes.
        calls: that they are made of.
    """

    units: Mapping[str, ModelPart]
    every: tuple[ModelPart, ...]
    calls: ForwardCalls


def parts_of(graph: LogicalGraph, blocks: Blocks | None, model: CostModel) -> Parts:
    """The parts of a captured step's model."""
    calls = forward_calls_of(graph, model)
    units = {path: _part(calls, (path,), calls.inside[path]) for path in _units(calls, blocks)}
    whole = _part(calls, (), calls.inside[""])
    found: dict[frozenset[int], ModelPart] = {}
    for patterns, own in _groups(graph, calls, units, blocks):
        if own not in found and own != calls.inside[""]:
            found[own] = _part(calls, patterns, own)
    most, work = WORTH * whole.parameters, WORTH * whole.work
    every = (part for part in found.values() if part.parameters > most or part.work > work)
    return Parts(units, tuple(every), calls)


def _part(calls: ForwardCalls, patterns: tuple[str, ...], own: frozenset[int]) -> ModelPart:
    work = sum(calls.work[number] for number in own)
    moved = Bytes(2 * calls.moved(own))
    return ModelPart(patterns, min(own), calls.parameters(own), work, moved)


def _units(calls: ForwardCalls, blocks: Blocks | None) -> list[str]:
    """Blocks, what else is numbered, and modules that are not; none around another."""
    numbered = {path: _NUMBERED.match(path) for path in calls.inside if path}
    found = {
        unit_of(blocks, path) or (match.group() if match else path)
        for path, match in numbered.items()
    }
    outer = {path for path in found if any(one.startswith(f"{path}.") for one in found)}
    return sorted(found - outer, key=lambda path: min(calls.inside[path]))


def _groups(
    graph: LogicalGraph, calls: ForwardCalls, units: Collection[str], blocks: Blocks | None
) -> Iterator[tuple[tuple[str, ...], frozenset[int]]]:
    """Patterns of modules, and their calls; of patterns for the same calls, the outermost first."""
    for path in sorted(calls.inside, key=lambda path: path.count(".")):
        if path:
            yield (path,), calls.inside[path]
    places: dict[str, set[int]] = defaultdict(set)
    for path, own in calls.inside.items():
        if unit_of(blocks, path) not in (None, path):
            places[starred_path(blocks, path)] |= own
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


# A backward takes about twice as long as its forward.
_WITH_BACKWARD = 3.0


@final
@dataclass(frozen=True)
class ForwardCalls:
    """The forward calls of a step, by their numbers in order.

    Attributes:
        work: of each, with its backward, in the units of the cost model.
        uses: names of what each reads.
        makes: names of what each makes.
        readers: of each value.
        sizes: bytes of each value.
        held: names of parameters.
        inside: for each module the calls of it and of all below; of the whole model under "".
        placed: those of modules.
    """

    work: Sequence[float]
    uses: Sequence[frozenset[str]]
    makes: Sequence[frozenset[str]]
    readers: Mapping[str, frozenset[int]]
    sizes: Mapping[str, Bytes]
    held: frozenset[str]
    inside: Mapping[str, frozenset[int]]
    placed: frozenset[int]

    def parameters(self, calls: Collection[int]) -> Bytes:
        """Bytes of the parameters that only these calls read."""
        own = frozenset(calls)
        read = {name for call in calls for name in self.uses[call] & self.held}
        alone = (name for name in read if self.readers[name] <= own)
        return Bytes(sum(self.sizes[name] for name in alone))

    def moved(self, calls: Collection[int]) -> Bytes:
        """Bytes that these calls read of others and modules of them, in the forward.

        Calls in no module, such as the loss, are where their operands are.
        """
        made = frozenset(name for call in calls for name in self.makes[call])
        read = frozenset(name for call in calls for name in self.uses[call]) - made - self.held
        others = self.placed - frozenset(calls)
        sent = (name for name in made if self.readers.get(name, frozenset()) & others)
        return Bytes(sum(self.sizes[name] for name in (*read, *sent)))


def forward_calls_of(graph: LogicalGraph, model: CostModel) -> ForwardCalls:
    """The forward calls of a captured step."""
    calls = [call for call in forward(graph) if call.makes and call.hint is None]
    readers: dict[str, set[int]] = defaultdict(set)
    inside: dict[str, set[int]] = defaultdict(set)
    placed = set[int]()
    for number, call in enumerate(calls):
        for name in call.uses:
            readers[name].add(number)
        module = call.location.module if call.location is not None else ""
        for path in ("", *around(module)):
            inside[path].add(number)
        placed |= {number} if module else set()
    return ForwardCalls(
        [_WITH_BACKWARD * call_cost(call.first, model) for call in calls],
        [frozenset(call.uses) for call in calls],
        [frozenset(value.name for value in call.makes) for call in calls],
        {name: frozenset(own) for name, own in readers.items()},
        {name: value.nbytes for name, value in graph.values.items()},
        frozenset(node.value.name for node in graph.of_kind(Input) if node.role == "parameter"),
        {path: frozenset(own) for path, own in inside.items()},
        frozenset(placed),
    )


def part_calls(graph: LogicalGraph) -> Sequence[Call]:
    """The forward calls that read a parameter, or what is made of it alone, and something else; in order."""
    parameters = _of_parameters(graph)
    return [
        call
        for call in forward(graph)
        if not parameters.isdisjoint(call.uses) and not parameters.issuperset(call.uses)
    ]


def _of_parameters(graph: LogicalGraph) -> set[str]:
    """Parameters, and what forward calls make of nothing else: casts and views."""
    found = {node.value.name for node in graph.of_kind(Input) if node.role == "parameter"}
    for call in forward(graph):
        if call.uses and found.issuperset(call.uses):
            found.update(value.name for value in call.makes)
    return found


def is_sequential(graph: LogicalGraph, blocks: Blocks | None) -> bool:
    """True if each part reads, through others, what the one before it made; so a step goes through all in turn.

    Parts are blocks, and outside of them products with a parameter. Towers side by side are
    not in line, nor gates of a cell.
    """
    parameters, heavy = _of_parameters(graph), {id(call) for call in part_calls(graph)}
    latest, last = dict[str, int](), -1
    number_of, linked = dict[object, int](), set[int]()
    for call in forward(graph):
        if parameters.issuperset(call.uses):
            continue
        before = max(latest.get(name, -1) for name in call.uses)
        block = unit_of(blocks, call.location.module if call.location is not None else "")
        is_product = id(call) in heavy and flops(call.first) > 0
        part: object | None = block or (id(call) if is_product else None)
        if part is not None:
            last = number_of.setdefault(part, len(number_of))
            if before == last - 1:
                linked.add(last)
            before = max(before, last)
        for value in call.makes:
            latest[value.name] = before
    return len(linked) == len(number_of)
