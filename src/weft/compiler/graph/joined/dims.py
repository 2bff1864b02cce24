"""Dimensions that join several parts: how far they go, and where they are cut into parts or joined from them.

The outputs of one matrix are cut into queries, keys and values; their gradients are joined again. In
between, the products, biases, casts, sums and updates do not care in which order the dimension
stands, as their rules tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import final

from weft.compiler.graph.joined.ends import Piece, parted, pieces_of, takes_one
from weft.compiler.hints import is_hint
from weft.ir.logical import VARIABLE_ROLES, Call, Input, LogicalGraph, Node, Update
from weft.ops.any_order import rows_of
from weft.ops.call import OpCall


@final
@dataclass(frozen=True)
class JoinedDim:
    """A dimension, wherever ops pass it on in any order.

    Attributes:
        size: of it.
        dims: its number in each value that has it.
        ends: the calls that cut it or join it, by the first value that they make.
        pieces: beginnings and ends of what they cut out, or put in.
    """

    size: int
    dims: Mapping[str, int]
    ends: frozenset[str]
    pieces: frozenset[Piece]

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the parts; none where pieces overlap, so that some hold several parts."""
        between = tuple(pairwise(sorted({0, self.size, *chain.from_iterable(self.pieces)})))
        if not self.pieces <= set(between):
            return ()
        return tuple(end - start for start, end in between)


def joined_dim(graph: LogicalGraph, name: str, dim: int) -> JoinedDim | None:
    """The dimension `dim` of a value, as far as it goes; None where something needs its order."""
    size = graph.values[name].shape[dim]
    walk = _DimWalk(graph, size)
    walk.add((name, dim))
    while walk.todo:
        if not walk.step(walk.todo.pop()):
            return None
    return JoinedDim(size, walk.dims, frozenset(walk.ends), frozenset(walk.pieces))


@dataclass
class _DimWalk:
    """Goes along the graph in both directions.

    Attributes:
        dims: what was reached, with the number of the dimension there.
        todo: what of it was not looked at yet.
        ends, pieces: as of `JoinedDim`.
    """

    graph: LogicalGraph
    size: int
    dims: dict[str, int] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    ends: set[str] = field(default_factory=set)
    pieces: set[Piece] = field(default_factory=set)

    def add(self, *reached: tuple[str, int]) -> bool:
        """Note values; False where one has the dimension in two places."""
        for name, dim in reached:
            if name not in self.dims:
                self.dims[name] = dim
                self.todo.append(name)
            if self.dims[name] != dim:
                return False
        return True

    def step(self, name: str) -> bool:
        """Go on from a value; False where something needs the order."""
        if not self._made(self.graph.producers[name], name):
            return False
        return all(self._read(node, name) for node in self.graph.users[name])

    def _made(self, node: Node, name: str) -> bool:
        if isinstance(node, Input):
            return node.role in VARIABLE_ROLES
        if not isinstance(node, Call):
            return False
        results = [value.name if value else "" for value in node.outputs]
        return self._call(node, {}, {results.index(name): self.dims[name]})

    def _read(self, node: Node, name: str) -> bool:
        if isinstance(node, Update):
            shape = self.graph.values[name].shape
            refs = (node.target, node.source, *node.states)
            same = [ref.name for ref in refs if self.graph.values[ref.name].shape == shape]
            return (
                node.elementwise
                and name in same
                and self.add(*((each, self.dims[name]) for each in same))
            )
        if not isinstance(node, Call):
            return False
        return self._call(node, {node.operands.index(name): self.dims[name]}, {})

    def _call(self, node: Call, here: Mapping[int, int], made: Mapping[int, int]) -> bool:
        if is_hint(node) or node.varyings:
            return False
        call = node.first
        found = rows_of(call, here, self.size, made)
        if found is None:
            return self._end(node, here, made)
        results = (value.name if value else "" for value in node.outputs)
        return self._add_all(node.operands, found[0]) and self._add_all(results, found[1])

    def _add_all(self, names: Iterable[str], dims: Iterable[int | None]) -> bool:
        pairs = zip(names, dims, strict=True)
        return self.add(*((name, dim) for name, dim in pairs if dim is not None))

    def _end(self, node: Call, here: Mapping[int, int], made: Mapping[int, int]) -> bool:
        """Note a call that cuts the dimension into parts, or joins it from parts."""
        call, joins = node.first, bool(made)
        (dim,) = (*here.values(), *made.values())
        pieces = pieces_of(call, dim, joins) or self._parted(node, call, dim, joins)
        self.pieces.update(pieces)
        self.ends.add(node.makes[0].name)
        # A call may cut another operand.
        return bool(pieces) and max(end for _, end in pieces) <= self.size

    def _parted(self, node: Call, call: OpCall, dim: int, joins: bool) -> tuple[Piece, ...]:
        """The pieces where a view has the parts one behind the other, and they are taken one by one."""
        parts = parted(call, dim, joins)
        if parts is None:
            return ()
        name = node.operands[0] if joins else node.makes[0].name
        count = self.graph.values[name].shape[parts]
        walk = _PartsWalk(self.graph, count, view=node)
        walk.add((name, parts))
        while walk.todo:
            if not walk.step(walk.todo.pop()):
                return ()
        return tuple(pairwise(range(0, self.size + 1, self.size // count))) if walk.taken else ()


@final
@dataclass
class _PartsWalk(_DimWalk):
    """Goes along a dimension of parts, up to where they are taken, or made, one by one.

    Attributes:
        view: which makes the dimension, or merges it.
        taken: true where parts are taken anywhere.
    """

    view: Call | None = None
    taken: bool = False

    def _end(self, node: Call, here: Mapping[int, int], made: Mapping[int, int]) -> bool:
        if node is self.view:
            return True
        (dim,) = (*here.values(), *made.values())
        self.taken = takes_one(node.first, dim, bool(made))
        return self.taken
