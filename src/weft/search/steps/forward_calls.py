"""The forward calls of a captured step as numbers: what they compute, hold and exchange, for any set of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

from weft.compiler.stages.balance import call_cost
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph
from weft.patterns import around
from weft.units import ITEM_SIZE, Bytes

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
        [_WITH_BACKWARD * call_cost(graph, call, model) for call in calls],
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
