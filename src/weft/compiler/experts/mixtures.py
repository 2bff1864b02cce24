"""Mixtures of experts in a graph whose experts a strategy splits, and the sizes of their buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, final

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import needed, only_result, ref_name
from weft.compiler.hints import Hints
from weft.ir.logical import Arg, Call, Input, LogicalGraph, Node, Ref, Value
from weft.layout import Broadcast, Split
from weft.ops.call import Token
from weft.ops.rules.own_ops import EXPERT_GRADIENT, EXPERT_MM, SEGMENTS

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
# Ops after a parameter that leave its experts in the first dimension.
_BEHIND = ("aten.transpose.int", "aten._to_copy.default", "aten.clone.default", "weft.hint")


@final
@dataclass(frozen=True)
class Mixture:
    """The products of one mixture of experts in a forward, a backward or both.

    Attributes:
        ids: the value with the expert of each row.
        biases: calls that read tables of as many experts, split alike.
        blocks: into how many blocks they are cut.
        groups: of rows; those of one rank.
        capacity: rows of a group that a block takes.
        bounded: true if the user says how many, not the routing.
    """

    ids: Value
    calls: tuple[Call, ...]
    biases: tuple[Call, ...]
    experts: int
    blocks: int
    groups: int
    capacity: int
    bounded: bool

    @property
    def rows(self) -> int:
        """Rows of the buffers, for each block."""
        return self.groups * self.capacity


def mixtures(graph: LogicalGraph, context: Context) -> tuple[Mixture, ...]:
    """The mixtures whose experts are split; those that do not divide evenly stay as they are."""
    found = (_mixture(graph, context, name, calls) for name, calls in _by_ids(graph).items())
    return tuple(one for one in found if one is not None)


def _by_ids(graph: LogicalGraph) -> dict[str, list[Call]]:
    """The products of experts, by the value with the expert of each row."""
    found: dict[str, list[Call]] = {}
    for node in graph.of_kind(Call):
        if node.op in (EXPERT_MM, EXPERT_GRADIENT):
            found.setdefault(ref_name(node.args[2]), []).append(node)
    return found


def note_mixtures(graph: LogicalGraph, context: Context) -> Context:
    """Note what buffers that hold all that there can be cost; rows that cannot be sent; sorts that stay."""
    found = mixtures(graph, context)
    said: dict[str, list[Call]] = {}
    sent = {mixture.ids.name for mixture in found}
    for name, calls in _by_ids(graph).items():
        grid, hints = _grid(context, calls)
        axes = (axis for each in _tables(calls) for axis in _split_axes(graph, each, hints))
        if name not in sent and any(grid[axis] > 1 for axis in axes):
            text = (
                "experts are split, but not evenly over the ranks or not along one axis alike: rows are not "
                "sent to them, every rank adds up what its own experts make of all rows"
            )
            said.setdefault(text, []).append(calls[0])
    for mixture in found:
        share = mixture.capacity * mixture.groups * mixture.blocks / mixture.ids.shape[0]
        if share > 1 and not mixture.bounded:
            text = (
                f"buffers hold {share:.3g} times the rows of an even routing, all that there can be; "
                "weft.expert_parallel(capacity=…), Strategy(expert_capacity=…), makes them smaller"
            )
            said.setdefault(text, []).append(mixture.calls[0])
    for name, calls in _by_ids(graph).items():
        maker = graph.producers[name]
        if isinstance(maker, Call) and maker.op in (SEGMENTS, *SORTS):
            text = "rows are sorted by experts with those of all ranks: what follows depends on their order"
            said.setdefault(text, []).append(calls[0])
    notes = []
    for text, every in said.items():
        first, *others = dict.fromkeys(call.module or "of the step" for call in every)
        named = f"{len(others) + 1} mixtures ({first}, …)" if others else f"the mixture {first}"
        notes.append(f"{named}: {text}")
    return replace(context, notes=(*context.notes, *notes))


def _grid(context: Context, calls: Sequence[Call]) -> tuple[tuple[int, ...], Hints]:
    """The grid on which the products of a mixture run, and the hints for it."""
    grid = context.stages.placements[calls[0].phase.stage].shape
    return grid, context.hints.get(len(grid), Hints())


def _tables(calls: Iterable[Call]) -> list[str]:
    """The values with the weights of all experts."""
    return [ref_name(call.args[1]) for call in calls if call.op == EXPERT_MM]


def _mixture(
    graph: LogicalGraph, context: Context, name: str, calls: Sequence[Call]
) -> Mixture | None:
    ids, (grid, hints) = graph.values[name], _grid(context, calls)
    axes = {_split_axes(graph, table, hints) for table in _tables(calls)}
    experts = {graph.values[table].shape[0] for table in _tables(calls)}
    if len(axes) != 1 or len(experts) != 1 or len(ids.shape) != 1:
        return None
    (split,), (count,) = axes, experts
    blocks, rows = prod(grid[axis] for axis in split), ids.shape[0]
    if blocks < 2 or count % blocks:
        return None
    keys = [node.key for node in graph.of_kind(Input) if node.role == "batch"]
    given = [hints.inputs[key] for key in keys if key in hints.inputs]
    groups = prod(
        parts
        for axis, parts in enumerate(grid)
        if not any(sbps[axis] == Broadcast() for sbps in given)
    )
    groups = groups if rows % groups == 0 else 1
    most, capacity = (
        _most(graph, ids, rows // groups, count // blocks),
        context.options.expert_capacity,
    )
    held = most if capacity is None else min(most, ceil(capacity * (rows / groups / blocks)))
    biases = tuple(
        node
        for node in graph.users[name]
        if isinstance(node, Call) and _reads_table(graph, node, count)
    )
    alike = {_split_axes(graph, ref_name(each.args[0]), hints) for each in biases} == axes
    own = biases if alike else ()
    return Mixture(
        ids, tuple(calls), own, count, blocks, groups, held, bounded=capacity is not None
    )


def _split_axes(graph: LogicalGraph, name: str, hints: Hints) -> tuple[int, ...]:
    """The axes along which the parameter that a table of experts is made of is split by experts."""
    maker = graph.producers[name]
    while isinstance(maker, Call) and maker.op in _BEHIND:
        dims = maker.args[1:] if maker.op == "aten.transpose.int" else ()
        if not all(isinstance(dim, int) and dim % 3 for dim in dims):
            return ()
        maker = graph.producers[ref_name(maker.args[0])]
    sbps = hints.inputs.get(maker.key, ()) if isinstance(maker, Input) else ()
    return tuple(axis for axis, sbp in enumerate(sbps) if sbp == Split(0))


def _most(graph: LogicalGraph, ids: Value, rows: int, experts: int) -> int:
    """Rows that a group can have for one block: `topk` gives a token no expert twice."""
    name, maker = ids.name, graph.producers[ids.name]
    while isinstance(maker, Call) and maker.op in ("aten.view.default", "aten.reshape.default"):
        name = ref_name(maker.args[0])
        maker = graph.producers[name]
    if not isinstance(maker, Call) or maker.op != "aten.topk.default":
        return rows
    shape = graph.values[name].shape
    dim = maker.args[2] if len(maker.args) > 2 else dict(maker.kwargs).get("dim", -1)
    chosen = maker.output_names[1] == name and dim in (-1, len(shape) - 1)
    return rows // shape[-1] * min(shape[-1], experts) if chosen and rows % shape[-1] == 0 else rows


# Biases of experts as products, so that they are added where the rows of their experts are.
#
# `b[ids]`, for a table b [e, n], gives each row what its expert adds. Read outside of the buffers, it would be sent
# there, as wide as what is computed. As `weft.expert_mm(ones[s, 1], b[e, 1, n], ids)` it is one more product of the
# mixture, and the sum of gradients by experts is its `weft.expert_gradient`, which adds up over micro-batches too.


ONES = "aten.ones_like.default"


def bias_gradients(graph: LogicalGraph) -> LogicalGraph:
    """The graph with sums of gradients by experts as products of the mixtures whose experts they read."""
    calls: list[Call] = graph.of_kind(Call)
    ids = {node.args[2] for node in calls if node.op in (EXPERT_MM, EXPERT_GRADIENT)}
    sums = [node for node in calls if _adds(graph, node, ids)]
    return as_products(graph, sums)[0] if sums else graph


def _reads_table(graph: LogicalGraph, node: Call, experts: int) -> bool:
    """True if a call reads a table [experts, n] at the experts of rows."""
    match node:
        case Call(op=op, args=(Ref(name=table), (Ref(),))) if op == INDEX:
            shape = graph.values[table].shape
            return len(shape) == 2 and shape[0] == experts
    return False


def _adds(graph: LogicalGraph, node: Call, ids: Collection[Arg]) -> bool:
    """True if rows are added to zeros [experts, n] at the experts of `ids`."""
    match node:
        case Call(op=op, args=(Ref(name=x), (Ref() as at,), Ref(), True)) if op == PUT:
            return at in ids and is_zeros(graph, x) and len(graph.values[x].shape) == 2
    return False


def is_zeros(graph: LogicalGraph, name: str) -> bool:
    """True if a value is made of zeros."""
    maker = graph.producers[name]
    return isinstance(maker, Call) and maker.op in ALIKE and "zeros" in maker.op


def as_products(
    graph: LogicalGraph, found: Sequence[Call]
) -> tuple[LogicalGraph, tuple[Call, ...]]:
    """The graph with such calls as products, and these."""
    chosen = {id(call) for call in found}
    nodes: list[Node] = []
    products: list[Call] = []
    for node in graph.nodes:
        if isinstance(node, Call) and id(node) in chosen:
            calls = _product(graph, node)
            nodes += calls
            products += [call for call in calls if call.op in (EXPERT_MM, EXPERT_GRADIENT)]
        else:
            nodes.append(node)
    return needed(replace(graph, nodes=tuple(nodes))), tuple(products)


def _product(graph: LogicalGraph, bias: Call) -> list[Call]:
    made, calls = only_result(bias), list[Call]()

    def call(
        op: str, args: tuple[Any, ...], name: str, shape: tuple[int, ...], dtype: str = made.dtype
    ) -> Ref:
        value = Value(f"{made.name}.{name}", shape, dtype)
        calls.append(bias.changed(op=op, args=args, kwargs=(), outputs=(value,)))
        return value.ref

    ids = bias.args[1]
    assert isinstance(ids, tuple)
    (chosen,) = ids
    numbers, experts = graph.values[ref_name(chosen)], graph.values[ref_name(bias.args[0])].shape[0]
    rows, wide = numbers.shape[0], (experts, 1, made.shape[1])
    each = call("aten.unsqueeze.default", (chosen, 1), "each", (rows, 1), numbers.dtype)
    one = call(ONES, (each,), "ones", (rows, 1))
    calls[-1] = calls[-1].changed(kwargs=(("dtype", Token("dtype", made.dtype)),))
    if bias.op == INDEX:
        cubic = call("aten.unsqueeze.default", (bias.args[0], 1), "apart", wide)
        return [*calls, bias.changed(op=EXPERT_MM, args=(one, cubic, chosen, 0))]
    apart = call(EXPERT_GRADIENT, (one, bias.args[2], chosen, experts, 0), "apart", wide)
    return [*calls, bias.changed(op="aten.squeeze.dim", args=(apart, 1), kwargs=())]
