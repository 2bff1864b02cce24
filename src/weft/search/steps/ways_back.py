"""The ways of gradients back through the forward: where parts of them must have been added up at last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple, final

from weft.compiler.stages.balance import call_cost
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph, Update, Value
from weft.ops import flops
from weft.patterns import around
from weft.search.steps.repeated import Blocks
from weft.units import ITEM_SIZE, Bytes

# More bytes than any weight has: nothing else keeps a sum away.
_MANY = Bytes(1 << 62)


def trained(graph: LogicalGraph) -> tuple[Input, ...]:
    """The parameters that an optimizer updates: no other one needs a gradient."""
    updates = graph.of_kind(Update)
    targets = {each.target.name for each in updates if each.rule != "copy"}
    return tuple(node for node in graph.of_kind(Input) if node.value.name in targets)


@final
class WayBack(NamedTuple):
    """A way that parts of a gradient go.

    Attributes:
        size: bytes of its smallest tensor.
        weights: bytes of the weights at its end: with these gathered, it does not end there.
    """

    size: Bytes
    weights: Bytes


@final
class WaysBack:
    """The ways of gradients: from a tensor back to where parts of it must have been added up.

    That is at a trained parameter, and at what a layer by rows made. A gradient may stay in parts up to there, as what
    lies between is linear in it; so it may be added up where it is smallest. Ways that share no tensor need a sum each.

    Args:
        graph: the captured step.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        self._graph = graph
        self._maker: dict[str, Call] = {}
        # Tensors that need a gradient; where ways end, with the bytes of weights that keep a sum away, too.
        self._differentiable = {node.value.name for node in trained(graph)}
        self._ends = dict.fromkeys(self._differentiable, _MANY)
        self._used = set[str]()

    def over(self, call: Call, rows: Input | None, stops: bool) -> None:
        """Go over the next call of the forward.

        Args:
            call: which.
            rows: the weight, where it is the product of a layer by rows.
            stops: true where no parts go back through it: it is one of a layer by columns.
        """
        if self._differentiable.isdisjoint(call.uses):
            return
        for value in call.makes:
            self._differentiable.add(value.name)
            if rows is not None:
                self._ends[value.name] = tensor_bytes(rows.value)
            elif not stops:
                self._maker[value.name] = call

    def lead_to(self, name: str) -> bool:
        """True where a tensor needs a gradient."""
        return name in self._differentiable

    def widest(self, name: str) -> WayBack | None:
        """The way whose smallest tensor is the largest, of those that are left; None where there is none."""
        waiting: list[tuple[int, int, tuple[str, ...]]] = [(-self._size(name), 0, (name,))]
        seen = set[str]()
        while waiting:
            width, steps, way = heappop(waiting)
            last = way[-1]
            if last in seen or last in self._used:
                continue
            seen.add(last)
            if last in self._ends:
                self._used.update(way)
                return WayBack(Bytes(-width), self._ends[last])
            uses = self._maker[last].uses if last in self._maker else ()
            for each in self._differentiable.intersection(uses):
                heappush(waiting, (max(width, -self._size(each)), steps + 1, (*way, each)))
        return None

    def _size(self, name: str) -> int:
        return tensor_bytes(self._graph.values[name])


def tensor_bytes(value: Value) -> Bytes:
    """Bytes of a whole tensor."""
    return Bytes(prod(value.shape) * ITEM_SIZE[value.dtype])


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

        What is in no module, such as the loss, is where its operands are.
        """
        made = frozenset(name for call in calls for name in self.makes[call])
        read = frozenset(name for call in calls for name in self.uses[call]) - made - self.held
        others = self.placed - frozenset(calls)
        sent = (name for name in made if self.readers.get(name, frozenset()) & others)
        return Bytes(sum(self.sizes[name] for name in (*read, *sent)))


def forward(graph: LogicalGraph) -> Iterator[Call]:
    """The calls of the forward, in order."""
    return (call for call in graph.of_kind(Call) if call.phase.kind == "forward")


def forward_calls_of(graph: LogicalGraph, model: CostModel) -> ForwardCalls:
    """The forward calls of a captured step.

    Args:
        graph: the step.
        model: what calls cost.
    """
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
        {
            name: Bytes(prod(value.shape) * ITEM_SIZE[value.dtype])
            for name, value in graph.values.items()
        },
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
    """True where each part reads, through others, what the one before it made; so a step goes through all in turn.

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
        part = _part(graph, blocks, call, heavy)
        if part is not None:
            last = number_of.setdefault(part, len(number_of))
            if before == last - 1:
                linked.add(last)
            before = max(before, last)
        for value in call.makes:
            latest[value.name] = before
    return len(linked) == len(number_of)


def _part(
    graph: LogicalGraph, blocks: Blocks | None, call: Call, heavy: Collection[int]
) -> object | None:
    """By which the part of a call is known: its block, or itself; None where it is of none."""
    if blocks is not None and call.location is not None:
        block = blocks.of(call.location.module)
        if block is not None:
            return block
    is_product = id(call) in heavy and flops(call.first) > 0
    return (id(call),) if is_product else None
