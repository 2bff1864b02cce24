"""Rows of experts without a sort: what a mixture of experts does to its rows, in their old order.

Grouped products want rows sorted by experts, so models sort the experts of all rows, move the rows,
and move the results back. A sort takes the rows of all ranks together. `weft.expert_mm` takes rows in
any order; so where it is proved that nothing else depends on the order (`weft.compiler.experts.sort_proof`),
the sort goes, and what moved rows becomes the identity. Two steps:

- `weft.segments(cumsum(histc(ids)))`, the expert of each sorted row, is what the sort made of the
  experts: exact when each is a number of an expert, which is so where `topk` or the like chose them.
- The permutation of a sort becomes 0, 1, 2, …: `x[i // k]` repeats each row k times, writing rows
  there and adding them up is a sum over k.

Where the proof fails the graph stays as it was: correct, with the rows of all ranks in one sort.

Before: a graph as captured, in which experts read sorted rows. After: an equal one, in which they read rows in
their old order, with the expert of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.experts.mixtures import bias_gradients
from weft.compiler.experts.sort_proof import (
    ALIKE,
    INDEX,
    PUT,
    SortedPlaces,
    is_plain_sort,
    moved_by,
)
from weft.compiler.graph.rewriting import needed, only_result, ref_name, renamed
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.call import Token
from weft.ops.rules.own_ops import SEGMENTS

# Ops that keep each number: of their first operand.
_SAME = frozenset(
    (
        *("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"),
        *("aten.clone.default", "aten._to_copy.default", "aten.flatten.using_ints"),
        *("aten.unsqueeze.default", "aten.squeeze.dim", "aten.expand.default", "aten.t.default"),
        *("aten.transpose.int", "aten.slice.Tensor", INDEX, "aten.gather.default"),
    )
)
# Which result says where, which argument names the dimension, and what it is where it is not given.
_CHOICES: Mapping[str, tuple[int, int, int | None]] = {
    "aten.topk.default": (1, 2, -1),
    "aten.sort.default": (1, 1, -1),
    "aten.argmax.default": (0, 1, None),
    "aten.max.dim": (1, 1, None),
}


_RESHAPE = ("aten._unsafe_view.default", "aten.reshape.default")


def remove_sorts(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """The graph without the sorts of rows by their experts."""
    if not any(isinstance(node, Call) and node.op == SEGMENTS for node in graph.nodes):
        return graph
    graph = needed(renamed(graph, segments_known(graph)))
    done: set[str] = set()
    while (sort := _next_sort(graph, done)) is not None:
        done.update(value.name for value in sort.makes)
        graph = _without(graph, sort) or graph
    return bias_gradients(graph)


def _next_sort(graph: LogicalGraph, done: set[str]) -> Call | None:
    for node in graph.nodes:
        if isinstance(node, Call) and is_plain_sort(graph, node):
            names = [value.name for value in node.makes]
            if len(names) == 2 and names[0] not in done:
                return node
    return None


def _without(graph: LogicalGraph, sort: Call) -> LogicalGraph | None:
    kinds = moved_by(graph, sort)
    values, permutation = sort.outputs
    if kinds is None or values is None or permutation is None:
        return None
    places = {name for name, kind in kinds.items() if isinstance(kind, SortedPlaces)}
    writer = _SortRemover(graph, {permutation.name: 1, **dict.fromkeys(places, 1)})
    writer.renamed[values.name] = ref_name(sort.args[0])
    for node in graph.nodes:
        writer.write(node)
    found = needed(renamed(replace(graph, nodes=tuple(writer.nodes)), writer.renamed))
    # What is left of the permutation would be a range over the rows of all ranks.
    left = any(name in writer.ranges for node in found.nodes for name in node.uses)
    return None if left else found


@final
@dataclass
class _SortRemover:
    """Writes the nodes of the new graph.

    Attributes:
        ranges: values that are i // k at position i, with their k.
        renamed: values that are equal to others.
    """

    graph: LogicalGraph
    ranges: dict[str, int]
    nodes: list[Node] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)

    def write(self, node: Node) -> None:
        if isinstance(node, Call) and self._is_known(node):
            return
        self.nodes.append(node)

    def _is_known(self, node: Call) -> bool:
        match node:
            case Call(op="aten.floor_divide.default", args=(Ref(name=i), int(k))) if k > 0:
                return self._divided(node, i, k)
            case Call(op="aten.div.Tensor_mode", args=(Ref(name=i), int(k))) if k > 0:
                floors = dict(node.kwargs).get("rounding_mode") == "floor"
                return floors and self._divided(node, i, k)
            case Call(op=op, args=(Ref() as x, (Ref(name=i),))) if op == INDEX:
                return i in self.ranges and self._read(node, x, self.ranges[i])
            case Call(op="aten.index_select.default", args=(Ref() as x, 0, Ref(name=i))):
                return i in self.ranges and self._read(node, x, self.ranges[i])
            case Call(op=op, args=(Ref() as x, (Ref(name=i),), Ref() as rows, *more)) if op == PUT:
                return i in self.ranges and self._put(node, x, self.ranges[i], rows, any(more))
            case Call(
                op="aten.index_add.default", args=(Ref() as x, 0, Ref(name=i), Ref() as rows)
            ):
                return i in self.ranges and not node.kwargs and self._add(node, x, i, rows)
        return False

    def _divided(self, node: Call, index: str, k: int) -> bool:
        if index not in self.ranges or self.graph.values[index].dtype != "int64":
            return False
        self.ranges[only_result(node).name] = self.ranges[index] * k
        return True

    def _read(self, node: Call, x: Ref, k: int) -> bool:
        """`x[i // k]`: each row k times."""
        made, source = only_result(node), self.graph.values[x.name]
        if source.shape[0] * k != made.shape[0]:
            return False
        if k == 1:
            self.renamed[made.name] = x.name
            return True
        rows, rest = source.shape[0], source.shape[1:]
        apart = self._call(node, "aten.unsqueeze.default", (x, 1), (rows, 1, *rest))
        wide = (rows, k, *rest)
        each = self._call(node, "aten.expand.default", (apart, wide), wide)
        layout = (("memory_format", Token("memory_format", "contiguous_format")),)
        copied = self._call(node, "aten.clone.default", (each,), wide, layout)
        args = (copied, made.shape)
        self.nodes.append(node.changed(op=_RESHAPE[0], args=args, kwargs=(), outputs=(made,)))
        return True

    def _put(self, node: Call, x: Ref, k: int, rows: Ref, adds: bool) -> bool:
        """Rows written at i // k into a tensor of which nothing is left, or added to zeros."""
        made, maker = only_result(node), self.graph.producers[x.name]
        given = self.graph.values[rows.name]
        zeros = isinstance(maker, Call) and maker.op in ALIKE and "zeros" in maker.op
        if given.shape != (made.shape[0] * k, *made.shape[1:]) or given.dtype != made.dtype:
            return False
        if k == 1 and (zeros or not adds):
            self.renamed[made.name] = rows.name
            return True
        return zeros and adds and self._summed(node, rows, k, made)

    def _add(self, node: Call, x: Ref, index: str, rows: Ref) -> bool:
        made, k = only_result(node), self.ranges[index]
        given = self.graph.values[rows.name]
        if given.shape != (made.shape[0] * k, *made.shape[1:]) or given.dtype != made.dtype:
            return False
        total = Value(f"{made.name}.summed", made.shape, made.dtype)
        self._summed(node, rows, k, total)
        args = (x, total.ref)
        self.nodes.append(node.changed(op="aten.add.Tensor", args=args, outputs=(made,)))
        return True

    def _summed(self, node: Call, rows: Ref, k: int, made: Value) -> bool:
        """The sum of each k rows."""
        shape = (made.shape[0], k, *made.shape[1:])
        apart = self._call(node, _RESHAPE[1], (rows, shape), shape, base=made)
        op, args = "aten.sum.dim_IntList", (apart, (1,))
        self.nodes.append(node.changed(op=op, args=args, kwargs=(), outputs=(made,)))
        return True

    def _call(
        self,
        node: Call,
        op: str,
        args: tuple[Arg, ...],
        shape: tuple[int, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
        base: Value | None = None,
    ) -> Ref:
        base = base or only_result(node)
        made = Value(f"{base.name}.{op.split('.')[1]}", shape, base.dtype)
        self.nodes.append(node.changed(op=op, args=args, kwargs=kwargs, outputs=(made,)))
        return made.ref


def segments_known(graph: LogicalGraph) -> dict[str, str]:
    """The values of sorted experts, by the names of the segments that are counted from them.

    Segments that are counted alike become the first of them, so that one mixture has one set of segments.
    """
    known: dict[str, str] = {}
    first: dict[tuple[Arg, ...], str] = {}
    for node in graph.nodes:
        if isinstance(node, Call) and node.op == SEGMENTS and node.outputs[0]:
            name = node.outputs[0].name
            same = _sorted_ids(graph, node) or first.setdefault(node.args, name)
            if same != name:
                known[name] = same
    return known


def _sorted_ids(graph: LogicalGraph, segments: Call) -> str | None:
    """The sorted experts whose numbers the ends of segments were counted from."""
    offs, rows, first = segments.args
    total = _maker(graph, offs, "aten._to_copy.default")
    if total is None or total.op != "aten.cumsum.default" or first != 0:
        return None
    counts = _maker(graph, total.args[0], "aten._to_copy.default")
    if counts is None or counts.op != "aten.histc.default":
        return None
    (experts,) = graph.values[ref_name(offs)].shape
    if counts.args[1:] not in ((experts, 0, experts - 1), (experts, 0, experts)):
        return None
    ids = ref_name(counts.args[0])
    maker = graph.producers[ids]
    while isinstance(maker, Call) and maker.op == "aten._to_copy.default":
        ids = ref_name(maker.args[0])
        maker = graph.producers[ids]
    if (source := _source_at_sort(graph, ids)) is not None:
        fits = graph.values[ids].shape == (rows,)
        return ids if fits and _are_below(graph, source, experts) else None
    for sort in (graph.producers[ids], *graph.users[ids]):
        if isinstance(sort, Call) and is_plain_sort(graph, sort) and sort.outputs[0]:
            values, source = sort.outputs[0], ref_name(sort.args[0])
            fits = ids in (values.name, source) and values.shape == (rows,)
            if fits and _are_below(graph, source, experts):
                return values.name
    return None


def _source_at_sort(graph: LogicalGraph, name: str) -> str | None:
    """`x` where a value is `x[argsort(x)]`."""
    match graph.producers[name]:
        case Call(op=op, args=(Ref(name=x), (Ref(name=order),))) if op == INDEX:
            sort = graph.producers[order]
        case _:
            return None
    if not isinstance(sort, Call) or not is_plain_sort(graph, sort):
        return None
    permutation = sort.outputs[1]
    at = permutation is not None and permutation.name == order
    return x if at and _is_same(graph, x, ref_name(sort.args[0])) else None


def _is_same(graph: LogicalGraph, a: str, b: str) -> bool:
    """True where two values are one, or alike views of one."""
    one, two = graph.producers[a], graph.producers[b]
    if a == b or not isinstance(one, Call) or not isinstance(two, Call):
        return a == b
    return one.op in _SAME and (one.op, one.args, one.kwargs) == (two.op, two.args, two.kwargs)


def _are_below(graph: LogicalGraph, name: str, experts: int) -> bool:
    """True where all numbers are in [0, experts): they were chosen among so many."""
    maker = graph.producers[name]
    while isinstance(maker, Call) and maker.op in _SAME and isinstance(maker.args[0], Ref):
        name = maker.args[0].name
        maker = graph.producers[name]
    match maker:
        case Call(op="aten.cat.default", args=(tuple(parts), *_)):
            return all(_are_below(graph, ref_name(part), experts) for part in parts)
        case Call(op="aten.clamp.default", args=(_, int(low), int(high))):
            return low >= 0 and high < experts
        case Call(op=op) if op in _CHOICES:
            return _is_choice(graph, maker, name, experts)
    return False


def _is_choice(graph: LogicalGraph, maker: Call, name: str, experts: int) -> bool:
    """True where a value says where in a dimension of no more than `experts` elements something was found."""
    result, place, default = _CHOICES[maker.op]
    chosen = maker.outputs[result]
    shape = graph.values[ref_name(maker.args[0])].shape
    dim = maker.args[place] if place < len(maker.args) else dict(maker.kwargs).get("dim", default)
    if chosen is None or chosen.name != name or not isinstance(dim, int):
        return False
    return shape[dim] <= experts


def _maker(graph: LogicalGraph, arg: Arg, through: str) -> Call | None:
    maker = graph.producers[arg.name] if isinstance(arg, Ref) else None
    while isinstance(maker, Call) and maker.op == through and isinstance(maker.args[0], Ref):
        maker = graph.producers[maker.args[0].name]
    return maker if isinstance(maker, Call) else None
