"""The values that only move their rows when a sort is taken out: the proof behind `weft.compiler.experts.remove_sorts`.

A sort of s numbers gives its values and a permutation of their positions. Without it both would stand
in the old order: `value[i] = old[permutation[i]]`. The proof follows what is computed from them. A
value is then a `Row` along a dimension (its rows are those of the old order, permuted), or `SortedPlaces`
(its numbers are places in the permuted order, such as the inverse permutation), or it is as before.
An op whose rule may split a dimension looks at each index of it alone, so it permutes its result as
its operands are; what it contracts does not depend on the order. Rows at places are as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.compiler.graph.rewriting import only_result, ref_name
from weft.errors import RuleError
from weft.ir.logical import Call, LogicalGraph, Node, Ref
from weft.ops.call import OpCall, slots
from weft.ops.factors import WHOLE, Dims, Factors, factor_sizes
from weft.ops.rule import rule_of

SORTS = ("aten.sort.default", "aten.sort.stable")
INDEX, PUT = "aten.index.Tensor", "aten.index_put.default"
# Every element is the same, or does not matter: rows in any order are as good.
ALIKE = frozenset(
    f"aten.{name}"
    for name in (
        *("full.default", "zeros.default", "ones.default", "empty.memory_format"),
        *("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default"),
        *("zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default"),
    )
)
# Ops that count, whatever the order.
_UNORDERED = ("aten.histc.default",)
# Ops whose arguments name sizes, which all ranks of a split have alike, but no positions.
_SIZED = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "reshape.default", "expand.default"),
        *("slice_backward.default", "select_backward.default", "broadcast_to.default"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "flatten.using_ints", "unflatten.int"),
    )
)


@final
@dataclass(frozen=True)
class Row:
    """Rows along `dim` stand in the order of the sort."""

    dim: int


@final
@dataclass(frozen=True)
class SortedPlaces:
    """Numbers of rows in the order of the sort."""


Kind: TypeAlias = Row | SortedPlaces


def moved_by(graph: LogicalGraph, sort: Call) -> Mapping[str, Kind] | None:
    """The values that the sort of a vector moves, by name; None where something else depends on its order."""
    return _Proof(graph, sort).run()


@final
class _Proof:
    def __init__(self, graph: LogicalGraph, sort: Call) -> None:
        self.graph = graph
        self.sort = sort
        self.kinds: dict[str, Kind] = {value.name: Row(0) for value in sort.makes}
        values, permutation = sort.output_names
        self.permutation = permutation
        self.rows = graph.values[permutation or values].shape[0]

    def run(self) -> Mapping[str, Kind] | None:
        """The kinds of all values that depend on the order; None where they leave what is understood."""
        for node in self.graph.nodes:
            if node is self.sort or not any(name in self.kinds for name in node.uses):
                continue
            if not isinstance(node, Call) or not self._follows(node):
                return None
        return self.kinds

    def _follows(self, node: Call) -> bool:
        """Note what a call makes of moved operands; False where that is not known."""
        if node.op in ALIKE or node.op in _UNORDERED:
            return True
        if node.op in SORTS:
            if ref_name(node.args[0]) != self.permutation or not is_plain_sort(self.graph, node):
                return self._by_rule(node)
            if node.outputs[1]:
                self.kinds[node.outputs[1].name] = SortedPlaces()
            return True
        if node.op == INDEX and self._at_places(node):
            return True
        if node.op == PUT:
            return self._put(node)
        return self._by_rule(node)

    def _at_places(self, node: Call) -> bool:
        x, indices = node.args
        at = [(dim, i.name) for dim, i in enumerate(_parts(indices)) if isinstance(i, Ref)]
        if len(at) != 1 or not isinstance(x, Ref):
            return False
        (dim, index), kind = at[0], self.kinds.get(x.name)
        return kind == Row(dim) and self.kinds.get(index) == SortedPlaces()

    def _put(self, node: Call) -> bool:
        x, indices, values, *more = node.args
        at = [i.name for i in _parts(indices) if isinstance(i, Ref)]
        if len(_parts(indices)) != 1 or not isinstance(x, Ref) or not isinstance(values, Ref):
            return self._by_rule(node)
        kind, whole = self.kinds.get(values.name), self._is_whole(x.name, values.name)
        if at == [self.permutation] and not any(more) and whole:
            # Rows that are written where they came from are as before; numbers in order become places.
            if kind == Row(0):
                return True
            if kind is None and is_range(self.graph, values.name):
                self.kinds[only_result(node).name] = SortedPlaces()
                return True
            return False
        if (
            self.kinds.get(at[0]) == SortedPlaces()
            and kind is None
            and self._is_alike(x.name, 0)
            and whole
        ):
            self.kinds[only_result(node).name] = Row(0)
            return True
        return self._by_rule(node)

    def _is_whole(self, x: str, values: str) -> bool:
        shape = self.graph.values[x].shape
        return shape == self.graph.values[values].shape and shape[:1] == (self.rows,)

    def _is_alike(self, name: str, dim: int) -> bool:
        """True where all rows along a dimension are the same: made so, or stretched."""
        maker = self.graph.producers[name]
        if not isinstance(maker, Call):
            return False
        source = maker.args[0] if maker.args else None
        if maker.op == "aten.expand.default" and isinstance(source, Ref):
            shape = self.graph.values[source.name].shape
            before = dim - len(self.graph.values[name].shape) + len(shape)
            return before < 0 or shape[before] == 1 != self.rows
        return maker.op in ALIKE

    def _by_rule(self, node: Call) -> bool:
        """By the factors of the op's rule: all moved dimensions carry one, of as many elements as rows."""
        call = node.first
        try:
            rule = rule_of(call)
            factors = rule.bind(call)
        except RuleError:
            return False
        if (
            rule.adapt is not None
            and node.op not in _SIZED
            and not node.op.startswith("weft.expert")
        ):
            return False  # positions count
        name = self._factor(node, call, factors)
        if name is None:
            return False
        for value, dims in zip(node.outputs, factors.results, strict=True):
            if value and name in dims:
                self.kinds[value.name] = Row(dims.index(name))
            elif value and name not in factors.contracted:
                return False
        return True

    def _factor(self, node: Call, call: OpCall, factors: Factors) -> str | None:
        """The factor that the moved operands carry, each of them, and every other has none of."""
        names = node.operands
        given = [
            (names[operand], dims)
            for operand, dims in zip(slots(call), factors.operands, strict=True)
        ]
        found = {self._carried(name, dims) for name, dims in given if name in self.kinds}
        if len(found) != 1 or (moved := found.pop()) in (WHOLE, *factors.whole):
            return None
        if set(factor_sizes(call, factors)[moved]) != {self.rows}:
            return None
        # A dimension of 1 that is stretched carries no factor; other carriers must be moved alike.
        still = [(name, dims) for name, dims in given if name not in self.kinds and moved in dims]
        alike = all(self._is_alike(name, dims.index(moved)) for name, dims in still)
        return moved if alike else None

    def _carried(self, name: str, dims: Dims) -> str:
        kind = self.kinds[name]
        if not isinstance(kind, Row) or dims.count(dims[kind.dim]) != 1:
            return WHOLE
        return dims[kind.dim]


def is_plain_sort(graph: LogicalGraph, node: Node) -> bool:
    """True where a node sorts a vector, the smallest first."""
    if not isinstance(node, Call) or node.op not in SORTS or not isinstance(node.args[0], Ref):
        return False
    settings = dict(node.kwargs)
    settings |= zip(("dim", "descending"), node.args[1:], strict=False)
    if node.op == SORTS[1]:
        settings = dict(node.kwargs)
    ascending = not settings.get("descending", False) and settings.get("dim", -1) in (0, -1)
    return len(graph.values[node.args[0].name].shape) == 1 and ascending


def is_range(graph: LogicalGraph, name: str) -> bool:
    """True where a value is 0, 1, 2, …"""
    maker = graph.producers[name]
    if not isinstance(maker, Call) or not maker.op.startswith("aten.arange."):
        return False
    length = graph.values[name].shape[0]
    return maker.args in ((length,), (0, length), (0, length, 1))


def _parts(arg: object) -> tuple[object, ...]:
    return arg if isinstance(arg, tuple) else ()
