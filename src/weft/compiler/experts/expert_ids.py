"""The expert of each sorted row, where a graph counts it from the sorted experts themselves; once, where not."""

from __future__ import annotations

from collections.abc import Mapping

from weft.compiler.experts.sorted_rows import INDEX, is_plain_sort
from weft.compiler.graph.rewriting import ref_name
from weft.ir.logical import Arg, Call, LogicalGraph, Ref
from weft.ops.rules.own.experts import SEGMENTS

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


def segments_known(graph: LogicalGraph) -> dict[str, str]:
    """The values of sorted experts, by the names of the segments that are counted from them.

    Of segments that are counted alike the first stands for all, so that they are those of one mixture.
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
    ids = _behind_casts(graph, counts.args[0])
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
    """The call that made a value, behind calls of one op."""
    maker = graph.producers[arg.name] if isinstance(arg, Ref) else None
    while isinstance(maker, Call) and maker.op == through and isinstance(maker.args[0], Ref):
        maker = graph.producers[maker.args[0].name]
    return maker if isinstance(maker, Call) else None


def _behind_casts(graph: LogicalGraph, arg: Arg) -> str:
    name = ref_name(arg)
    maker = graph.producers[name]
    while isinstance(maker, Call) and maker.op == "aten._to_copy.default":
        name = ref_name(maker.args[0])
        maker = graph.producers[name]
    return name
