"""What really splits of a sample: along which dimensions of its inputs, and what is gathered and runs whole.

One input is split along one dimension over two ranks, all else is free, and deduction chooses signatures, with gathers
priced so high that none is chosen where another way exists. Results are not asked for whole. Where no split value is
made whole for a call to read, the sample splits along that dimension: reductions of sums, and exchanges of pieces,
are no gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.compiler.decompositions.fused_losses import fuse_class_losses
from weft.compiler.decompositions.table import expand
from weft.compiler.hints import Hints
from weft.compiler.layouts.box import box, deduce
from weft.hardware import CostModel
from weft.ir.logical import Box, Call, Input, LogicalGraph, Output
from weft.layout import Broadcast, Partial, Placement, Split
from weft.ops import signatures

PAIR = Placement("cpu", (2,), (0, 1))
# A byte by which boxing makes a tensor larger, beside 4 for an operation.
NEVER_GATHER = CostModel(bytes_per_held=1e4)
# An input of a sample, and a dimension of it.
Place = tuple[str, int]


@dataclass
class Splitting:
    """What splits of an op, over its samples.

    Attributes:
        samples: those with a dimension of at least 2 elements to split, and without empty inputs.
        split: those that split along some dimension, values and gradients.
        along: for each input and dimension, how many samples split along it, and how many gather.
        partial: for each input, how many samples take it as a sum that nobody reduced.
        gathered: ops that read what was gathered, by the number of times.
    """

    samples: int = 0
    split: int = 0
    along: dict[Place, list[int]] = field(default_factory=dict)
    partial: Counter[str] = field(default_factory=Counter)
    gathered: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """splits, in part, whole, or nothing where no sample has anything to split."""
        if not self.samples:
            return "nothing"
        if self.split == self.samples:
            return "splits"
        return "in part" if self.split else "whole"

    def add(self, graph: LogicalGraph, shapes: Mapping[str, Sequence[int]]) -> None:
        """Add a sample: its graph, and the shapes of its floating-point and other inputs by key."""
        if not has_splits(shapes):
            return
        bare = without_outputs(graph)
        places = [(key, dim) for key, shape in shapes.items() for dim in splittable(shape)]
        found = {place: tuple(gathers(bare, place)) for place in places}
        self.samples += 1
        self.split += not all(found.values())
        for place, readers in found.items():
            self.along.setdefault(place, [0, 0])[bool(readers)] += 1
            self.gathered.update(set(readers))
        self.partial.update(key for key in shapes if takes_partial(bare, key))


def has_splits(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether an input has a dimension to split, and none is empty."""
    return any(map(splittable, shapes.values())) and all(0 not in x for x in shapes.values())


def splittable(shape: Sequence[int]) -> list[int]:
    """The dimensions with an element for each of two ranks."""
    return [dim for dim, size in enumerate(shape) if size > 1]


def without_outputs(graph: LogicalGraph) -> LogicalGraph:
    """The graph of what is returned, but nobody asks for it: results stay as they are made.

    All inputs are constants: whole where no hint says otherwise, and cut for nothing.
    """
    needed: set[str] = set()
    nodes: list[Any] = []
    for node in reversed(graph.nodes):
        if isinstance(node, Output):
            needed.update(node.uses)
        elif isinstance(node, Input):
            nodes.append(replace(node, role="constant"))
        elif any(value.name in needed for value in node.makes):
            needed.update(node.uses)
            nodes.append(node)
    return LogicalGraph(graph.name, tuple(reversed(nodes)))


def gathers(graph: LogicalGraph, place: Place) -> Iterator[str]:
    """The ops that read a value whole that was split, where an input is split in one dimension."""
    key, dim = place
    assignment = deduce(graph, Hints({key: (Split(dim),)}), PAIR, NEVER_GATHER)
    boxed = box(*expand(*fuse_class_losses(graph, assignment)))
    for node in boxed.of_kind(Box):
        source, target = boxed.values[node.input.name].layout, node.output.layout
        assert source is not None
        assert target is not None
        if isinstance(source.sbp[0], Split) and isinstance(target.sbp[0], Broadcast):
            for reader in boxed.of_kind(Call):
                if node.output.name in reader.uses:
                    yield reader.op


def takes_partial(graph: LogicalGraph, key: str) -> bool:
    """Whether an input may be a sum that nobody reduced: each call that reads it has a signature for that."""
    name = next(node.value.name for node in graph.of_kind(Input) if node.key == key)
    readers = [node for node in graph.of_kind(Call) if name in node.uses]
    return bool(readers) and all(_reads_partial(graph, node, name) for node in readers)


def _reads_partial(graph: LogicalGraph, node: Call, name: str) -> bool:
    at = [i for i, operand in enumerate(node.operands) if operand == name]
    legal = signatures(node.first, len(PAIR.ranks))
    return any(all(one.operands[i] == Partial() for i in at) for one in legal)
