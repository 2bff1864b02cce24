"""A mixture of experts without the sort: experts read rows in their original order.

Grouped products want rows sorted by experts, so models sort the experts of all rows, move the rows, and move the
results back. A sort takes the rows of all ranks together. `weft.expert_mm` takes rows in any order; so where rules
prove that nothing else depends on the order, the sort goes, in two steps:

- `weft.segments(cumsum(histc(ids)))`, the expert of each sorted row, is what the sort made of the experts: exact when
  each is a number of an expert, which is so where `topk` or the like chose them.
- The permutation of a sort becomes 0, 1, 2, …: `x[i // k]` repeats each row k times, writing rows there and adding
  them up is a sum over k.

The proof (`_Proof`) follows the values that a sort moves. If it fails the graph stays as it was: correct, with the
rows of all ranks in one sort.

Before: a graph as captured, in which experts read sorted rows. After: an equal graph, in which they read rows in their
old order, with the expert of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.experts.mixtures import ALIKE, INDEX, PUT, SORTS, bias_gradients, is_zeros
from weft.compiler.graph.rewriting import needed, only_result, ref_name, renamed
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.any_order import rows_of
from weft.ops.call import Token
from weft.ops.rules.own_ops import SEGMENTS

# An op that counts, whatever the order.
_HISTOGRAM = "aten.histc.default"
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
_CAST = "aten._to_copy.default"


def remove_sorts(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """The graph without the sorts of rows by their experts."""
    if not any(node.op == SEGMENTS for node in graph.of_kind(Call)):
        return graph
    # Segments that are counted alike become the first of them, so that one mixture has one set of segments.
    known: dict[str, str] = {}
    first: dict[tuple[Arg, ...], str] = {}
    for node in graph.of_kind(Call):
        if node.op == SEGMENTS and node.outputs[0]:
            name = node.outputs[0].name
            same = _sorted_ids(graph, node) or first.setdefault(node.args, name)
            if same != name:
                known[name] = same
    graph = needed(renamed(graph, known))
    done: set[str] = set()
    while sorts := [
        each
        for each in graph.of_kind(Call)
        if _is_plain_sort(graph, each) and len(each.makes) == 2 and each.makes[0].name not in done
    ]:
        done.update(value.name for value in sorts[0].makes)
        graph = _without(graph, sorts[0]) or graph
    return bias_gradients(graph)


def _is_plain_sort(graph: LogicalGraph, node: Node) -> bool:
    """True if a node sorts a vector, the smallest first."""
    if not isinstance(node, Call) or node.op not in SORTS or not isinstance(node.args[0], Ref):
        return False
    settings = dict(node.kwargs) | dict(zip(("dim", "descending"), node.args[1:], strict=False))
    ascending = not settings.get("descending", False) and settings.get("dim", -1) in (0, -1)
    return len(graph.values[node.args[0].name].shape) == 1 and ascending


def _without(graph: LogicalGraph, sort: Call) -> LogicalGraph | None:
    """The graph without a sort, whose permutation is 0, 1, 2, …; None if something depends on its order."""
    values, permutation = sort.makes
    proof = _Proof(graph, permutation.name, {value.name: 0 for value in sort.makes})
    if not all(node is sort or proof.follows(node) for node in graph.nodes):
        return None
    writer = _SortRemover(graph, dict.fromkeys((permutation.name, *proof.places), 1))
    writer.renamed[values.name] = ref_name(sort.args[0])
    for node in graph.nodes:
        if not (isinstance(node, Call) and writer.replaces(node)):
            writer.nodes.append(node)
    found = needed(renamed(replace(graph, nodes=tuple(writer.nodes)), writer.renamed))
    # The rest of the permutation would be a range over the rows of all ranks.
    left = any(name in writer.ranges for node in found.nodes for name in node.uses)
    return None if left else found


@final
@dataclass(slots=True)
class _Proof:
    """The values that change when a sort is removed; only their rows move: `value[i] = old[permutation[i]]`.

    An op that does not care in which order rows stand moves the rows of its results as those of its operands. Rows that
    are read at `places`, or written where they came from, stand as before.

    Attributes:
        moved: the dimension of the rows in each value whose rows are in the order of the sort.
        places: values that hold numbers of rows in the order of the sort, such as the inverse permutation.
    """

    graph: LogicalGraph
    permutation: str
    moved: dict[str, int]
    places: set[str] = field(default_factory=set)

    @property
    def rows(self) -> int:
        """The length of what is sorted."""
        return self.graph.values[self.permutation].shape[0]

    def follows(self, node: Node) -> bool:
        """Note the results of a node that change too; False if the node depends on the order in another way."""
        if self.places.isdisjoint(node.uses) and self.moved.keys().isdisjoint(node.uses):
            return True
        if not isinstance(node, Call):
            return False
        match node.args:
            case _ if node.op in ALIKE or node.op == _HISTOGRAM:
                return True
            case (Ref(name=self.permutation), *_) if _is_plain_sort(self.graph, node):
                self.places.update(name for name in node.output_names[1:] if name)
                return True
            case (Ref(name=x), (*before, Ref(name=at))) if node.op == INDEX and at in self.places:
                return not any(before) and self.moved.get(x) == len(before)
            case (Ref(name=x), (Ref(name=at),), Ref(name=rows), *adds) if node.op == PUT:
                found = self._written(node, x, at, rows, any(adds))
                return self._by_rule(node) if found is None else found
        return self._by_rule(node)

    def _written(self, node: Call, x: str, at: str, rows: str, adds: bool) -> bool | None:
        """True if rows that are written at positions stand as before or move; None if the op's rule must say."""
        shape = self.graph.values[x].shape
        whole = shape == self.graph.values[rows].shape and shape[:1] == (self.rows,)
        made, still = only_result(node).name, rows not in self.moved and rows not in self.places
        if at == self.permutation and whole and not adds:
            # Rows that are written where they came from are as before; numbers in order become places.
            maker, length = self.graph.producers[rows], shape[0]
            ranges = (length,), (0, length), (0, length, 1)
            arange = isinstance(maker, Call) and maker.op.startswith("aten.arange.")
            if still and arange and isinstance(maker, Call) and maker.args in ranges:
                self.places.add(made)
                return True
            return self.moved.get(rows) == 0
        if at in self.places and whole and still and self._is_alike(x, 0):
            self.moved[made] = 0
            return True
        return None

    def _is_alike(self, name: str, dim: int) -> bool:
        """True if all rows along a dimension are the same: made so, or stretched."""
        match self.graph.producers[name]:
            case Call(op="aten.expand.default", args=(Ref(name=source), *_)):
                shape = self.graph.values[source].shape
                before = dim - len(self.graph.values[name].shape) + len(shape)
                return before < 0 or shape[before] == 1 != self.rows
            case Call(op=op):
                return op in ALIKE
        return False

    def _by_rule(self, node: Call) -> bool:
        """By the op's rule: operands whose rows did not move have none along that dimension, or have all alike."""
        names = node.operands
        here = {place: self.moved[name] for place, name in enumerate(names) if name in self.moved}
        found = rows_of(node.first, here, self.rows)
        if found is None or not self.places.isdisjoint(names):
            return False
        for name, dim in zip(names, found[0], strict=True):
            if dim is not None and name not in self.moved and not self._is_alike(name, dim):
                return False
        made = zip(node.output_names, found[1], strict=True)
        self.moved.update((name, dim) for name, dim in made if name and dim is not None)
        return True


@final
@dataclass(slots=True)
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

    def replaces(self, node: Call) -> bool:
        """Write what a call that reads a range amounts to; False for every other call."""
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
                return (
                    i in self.ranges
                    and not node.kwargs
                    and self._add(node, x, self.ranges[i], rows)
                )
        return False

    def _divided(self, node: Call, index: str, k: int) -> bool:
        if index not in self.ranges or self.graph.values[index].dtype != "int64":
            return False
        self.ranges[only_result(node).name] = self.ranges[index] * k
        return True

    def _read(self, node: Call, x: Ref, k: int) -> bool:
        """`x[i // k]`: each row k times."""
        made, (rows, *rest) = only_result(node), self.graph.values[x.name].shape
        if rows * k != made.shape[0]:
            return False
        if k == 1:
            self.renamed[made.name] = x.name
            return True
        wide = (rows, k, *rest)
        apart = self._call(node, "aten.unsqueeze.default", (x, 1), (rows, 1, *rest))
        each = self._call(node, "aten.expand.default", (apart, wide), wide)
        layout = (("memory_format", Token("memory_format", "contiguous_format")),)
        copied = self._call(node, "aten.clone.default", (each,), wide, layout)
        op, args = "aten._unsafe_view.default", (copied, made.shape)
        self.nodes.append(node.changed(op=op, args=args, kwargs=(), outputs=(made,)))
        return True

    def _put(self, node: Call, x: Ref, k: int, rows: Ref, adds: bool) -> bool:
        """Rows written at i // k into a tensor of which nothing is left, or added to zeros."""
        made, zeros = only_result(node), is_zeros(self.graph, x.name)
        if not self._fits(rows, made, k) or not (zeros or (k == 1 and not adds)):
            return False
        if k == 1:
            self.renamed[made.name] = rows.name
        elif adds:
            self._sum(node, rows, k, made)
        return k == 1 or adds

    def _add(self, node: Call, x: Ref, k: int, rows: Ref) -> bool:
        made = only_result(node)
        if not self._fits(rows, made, k):
            return False
        total = Value(f"{made.name}.summed", made.shape, made.dtype)
        self._sum(node, rows, k, total)
        args = (x, total.ref)
        self.nodes.append(node.changed(op="aten.add.Tensor", args=args, outputs=(made,)))
        return True

    def _fits(self, rows: Ref, made: Value, k: int) -> bool:
        """True if k rows are given for each row of a result."""
        given = self.graph.values[rows.name]
        return given.shape == (made.shape[0] * k, *made.shape[1:]) and given.dtype == made.dtype

    def _sum(self, node: Call, rows: Ref, k: int, made: Value) -> None:
        """Write the sum of each k rows."""
        shape = (made.shape[0], k, *made.shape[1:])
        apart = self._call(node, "aten.reshape.default", (rows, shape), shape, base=made)
        op, args = "aten.sum.dim_IntList", (apart, (1,))
        self.nodes.append(node.changed(op=op, args=args, kwargs=(), outputs=(made,)))

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


def _sorted_ids(graph: LogicalGraph, segments: Call) -> str | None:
    """The sorted experts whose numbers the ends of segments were counted from."""
    offs, rows, first = segments.args
    total = graph.producers[_behind_casts(graph, ref_name(offs))]
    if not (isinstance(total, Call) and total.op == "aten.cumsum.default" and first == 0):
        return None
    counts = graph.producers[_behind_casts(graph, ref_name(total.args[0]))]
    (experts,) = graph.values[ref_name(offs)].shape
    bins = (experts, 0, experts - 1), (experts, 0, experts)
    if not (isinstance(counts, Call) and counts.op == _HISTOGRAM and counts.args[1:] in bins):
        return None
    ids = _behind_casts(graph, ref_name(counts.args[0]))
    if graph.values[ids].shape != (rows,):
        return None
    if (source := _source_at_sort(graph, ids)) is not None:
        return ids if _are_below(graph, source, experts) else None
    for sort in (graph.producers[ids], *graph.users[ids]):
        if isinstance(sort, Call) and _is_plain_sort(graph, sort) and sort.outputs[0]:
            values, source = sort.outputs[0].name, ref_name(sort.args[0])
            if ids in (values, source) and _are_below(graph, source, experts):
                return values
    return None


def _behind_casts(graph: LogicalGraph, name: str) -> str:
    """The value that others were converted from."""
    while isinstance(maker := graph.producers[name], Call) and maker.op == _CAST:
        name = ref_name(maker.args[0])
    return name


def _source_at_sort(graph: LogicalGraph, name: str) -> str | None:
    """`x` where a value is `x[argsort(x)]`."""
    match graph.producers[name]:
        case Call(op=op, args=(Ref(name=x), (Ref(name=order),))) if op == INDEX:
            sort = graph.producers[order]
            at = isinstance(sort, Call) and _is_plain_sort(graph, sort)
            if isinstance(sort, Call) and at and sort.output_names[1:] == (order,):
                one, other = graph.producers[x], graph.producers[ref_name(sort.args[0])]
                # One value, or alike views of one.
                if one is other:
                    return x if x == ref_name(sort.args[0]) else None
                if not isinstance(one, Call) or not isinstance(other, Call) or one.op not in _SAME:
                    return None
                same = (one.op, one.args, one.kwargs) == (other.op, other.args, other.kwargs)
                return x if same else None
    return None


def _are_below(graph: LogicalGraph, name: str, experts: int) -> bool:
    """True if all numbers are in [0, experts): they were chosen among so many."""
    match graph.producers[name]:
        case Call(op=op, args=(Ref(name=source), *_)) if op in _SAME:
            return _are_below(graph, source, experts)
        case Call(op="aten.cat.default", args=(tuple(parts), *_)):
            return all(_are_below(graph, ref_name(part), experts) for part in parts)
        case Call(op="aten.clamp.default", args=(_, int(low), int(high))):
            return low >= 0 and high < experts
        case Call(op=op, args=args) as maker if op in _CHOICES:
            # It says where in a dimension of no more than `experts` elements something was found.
            result, place, default = _CHOICES[op]
            dim = args[place] if place < len(args) else dict(maker.kwargs).get("dim", default)
            if maker.output_names[result] == name and isinstance(dim, int):
                return graph.values[ref_name(args[0])].shape[dim] <= experts
    return False
