"""Mixtures of experts in a graph whose experts a strategy splits, and the sizes of their buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, final

from weft.compiler.context import Context, Stages
from weft.compiler.experts.sort_proof import ALIKE, INDEX, PUT, SORTS
from weft.compiler.graph.rewriting import needed, only_result, ref_name
from weft.compiler.hints import Hints
from weft.ir.logical import Arg, Call, Input, LogicalGraph, Node, Ref, Value
from weft.layout import Broadcast, Split
from weft.ops.call import Token
from weft.ops.rules.own_ops import EXPERT_GRADIENT, EXPERT_MM, SEGMENTS

# Ops behind a parameter that leave its experts in the first dimension.
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
        bounded: true where the user says how many, not the routing.
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
    hints, stages, capacity = context.hints, context.stages, context.options.expert_capacity
    found = (
        _mixture(graph, graph.values[name], tuple(calls), hints, stages, capacity)
        for name, calls in _by_ids(graph).items()
    )
    return tuple(one for one in found if one is not None)


def _by_ids(graph: LogicalGraph) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for node in graph.nodes:
        if isinstance(node, Call) and node.op in (EXPERT_MM, EXPERT_GRADIENT):
            found.setdefault(ref_name(node.args[2]), []).append(node)
    return found


def note_mixtures(graph: LogicalGraph, context: Context) -> Context:
    """Note what buffers that hold all that there can be cost; rows that cannot be sent; sorts that stay."""
    found, hints, stages = mixtures(graph, context), context.hints, context.stages
    said: dict[str, list[str]] = {}
    sent = {mixture.ids.name for mixture in found}
    for name, calls in _by_ids(graph).items():
        if name not in sent and _splits_experts(graph, calls, hints, stages):
            text = (
                "experts are split, but not evenly over the ranks or not along one axis alike: rows are not "
                "sent to them, every rank adds up what its own experts make of all rows"
            )
            said.setdefault(text, []).append(_module(calls[0]))
    for mixture in found:
        share = mixture.capacity * mixture.groups * mixture.blocks / mixture.ids.shape[0]
        if share > 1 and not mixture.bounded:
            text = (
                f"buffers hold {share:.3g} times the rows of an even routing, all that there can be; "
                "weft.expert_parallel(capacity=…), Strategy(expert_capacity=…), makes them smaller"
            )
            said.setdefault(text, []).append(_module(mixture.calls[0]))
    for name, calls in _by_ids(graph).items():
        maker = graph.producers[name]
        if isinstance(maker, Call) and maker.op in (SEGMENTS, *SORTS):
            text = "rows are sorted by experts with those of all ranks: what follows depends on their order"
            said.setdefault(text, []).append(_module(calls[0]))
    notes = tuple(f"{_named(modules)}: {text}" for text, modules in said.items())
    return replace(context, notes=(*context.notes, *notes))


def _splits_experts(
    graph: LogicalGraph, calls: Sequence[Call], hints: Mapping[int, Hints], stages: Stages
) -> bool:
    grid = stages.placements[calls[0].phase.stage].shape
    on_grid = hints.get(len(grid), Hints())
    products = (call for call in calls if call.op == EXPERT_MM)
    return any(
        grid[axis] > 1
        for call in products
        for axis in _split_axes(graph, ref_name(call.args[1]), on_grid)
    )


def _named(modules: Sequence[str]) -> str:
    first, *others = dict.fromkeys(modules)
    return f"{len(others) + 1} mixtures ({first}, …)" if others else f"the mixture {first}"


def _module(call: Call) -> str:
    return call.module or "of the step"


def _mixture(
    graph: LogicalGraph,
    ids: Value,
    calls: tuple[Call, ...],
    hints: Mapping[int, Hints],
    stages: Stages,
    capacity: float | None,
) -> Mixture | None:
    products = [call for call in calls if call.op == EXPERT_MM]
    grid = stages.placements[calls[0].phase.stage].shape
    on_grid = hints.get(len(grid), Hints())
    axes = {_split_axes(graph, ref_name(call.args[1]), on_grid) for call in products}
    experts = {graph.values[ref_name(call.args[1])].shape[0] for call in products}
    if len(axes) != 1 or len(experts) != 1 or len(ids.shape) != 1:
        return None
    (split,), (count,) = axes, experts
    blocks, rows = prod(grid[axis] for axis in split), ids.shape[0]
    if blocks < 2 or count % blocks:
        return None
    groups = prod(grid[axis] for axis in _batch_axes(graph, on_grid, len(grid)))
    groups = groups if rows % groups == 0 else 1
    most = _most(graph, ids, rows // groups, count // blocks)
    even = rows / groups / blocks
    held = most if capacity is None else min(most, ceil(capacity * even))
    tables = biases(graph, ids.name, count)
    alike = {_split_axes(graph, ref_name(each.args[0]), on_grid) for each in tables} == axes
    return Mixture(
        ids, calls, tables if alike else (), count, blocks, groups, held, capacity is not None
    )


def _split_axes(graph: LogicalGraph, name: str, hints: Hints) -> tuple[int, ...]:
    maker = graph.producers[name]
    while isinstance(maker, Call) and maker.op in _BEHIND:
        if maker.op == "aten.transpose.int" and not all(
            isinstance(dim, int) and dim % 3 for dim in maker.args[1:]
        ):
            return ()
        maker = graph.producers[ref_name(maker.args[0])]
    sbps = hints.inputs.get(maker.key, ()) if isinstance(maker, Input) else ()
    return tuple(axis for axis, sbp in enumerate(sbps) if sbp == Split(0))


def _batch_axes(graph: LogicalGraph, hints: Hints, axes: int) -> tuple[int, ...]:
    keys = [node.key for node in graph.of_kind(Input) if node.role == "batch"]
    given = [hints.inputs[key] for key in keys if key in hints.inputs]
    return tuple(
        axis for axis in range(axes) if not any(sbps[axis] == Broadcast() for sbps in given)
    )


def _most(graph: LogicalGraph, ids: Value, rows: int, experts: int) -> int:
    """Rows that a group can have for one block: `topk` gives a token no expert twice."""
    name, maker = ids.name, graph.producers[ids.name]
    while isinstance(maker, Call) and maker.op in ("aten.view.default", "aten.reshape.default"):
        name = ref_name(maker.args[0])
        maker = graph.producers[name]
    if not isinstance(maker, Call) or maker.op != "aten.topk.default":
        return rows
    each = graph.values[name].shape[-1]
    dim = maker.args[2] if len(maker.args) > 2 else dict(maker.kwargs).get("dim", -1)
    last = dim in (-1, len(graph.values[name].shape) - 1)
    chosen = maker.outputs[1] is not None and maker.outputs[1].name == name and last
    return rows // each * min(each, experts) if chosen and rows % each == 0 else rows


# Biases of experts as products, so that they are added where the rows of their experts are.
#
# `b[ids]`, for a table b [e, n], gives each row what its expert adds. Read outside of the buffers, it would be sent
# there, as wide as what is computed. As `weft.expert_mm(ones[s, 1], b[e, 1, n], ids)` it is one more product of the
# mixture, and the sum of gradients by experts is its `weft.expert_gradient`, which adds up over micro-batches too.


ONES = "aten.ones_like.default"


def bias_gradients(graph: LogicalGraph) -> LogicalGraph:
    """The graph with sums of gradients by experts as products of the mixtures whose experts they read."""
    ids = {node.args[2] for node in graph.of_kind(Call) if node.op in (EXPERT_MM, EXPERT_GRADIENT)}
    sums = [node for node in graph.of_kind(Call) if _adds(graph, node, ids)]
    return as_products(graph, sums)[0] if sums else graph


def biases(graph: LogicalGraph, ids: str, experts: int) -> tuple[Call, ...]:
    """The calls that read a table [experts, n] at the experts of rows."""
    users = graph.users[ids]
    return tuple(node for node in users if isinstance(node, Call) and _reads(graph, node, experts))


def _reads(graph: LogicalGraph, node: Call, experts: int) -> bool:
    match node:
        case Call(op=op, args=(Ref(name=table), (Ref(),))) if op == INDEX:
            shape = graph.values[table].shape
            return len(shape) == 2 and shape[0] == experts
    return False


def _adds(graph: LogicalGraph, node: Call, ids: Collection[Arg]) -> bool:
    """True where rows are added to zeros [experts, n] at the experts of `ids`."""
    match node:
        case Call(op=op, args=(Ref(name=x), (Ref() as at,), Ref(), True)) if (
            op == PUT and at in ids
        ):
            maker = graph.producers[x]
            zeros = isinstance(maker, Call) and maker.op in ALIKE and "zeros" in maker.op
            return zeros and len(graph.values[x].shape) == 2
    return False


def as_products(
    graph: LogicalGraph, found: Sequence[Call]
) -> tuple[LogicalGraph, tuple[Call, ...]]:
    """The graph with such calls as products, and these."""
    chosen = {id(call) for call in found}
    nodes: list[Node] = []
    products: list[Call] = []
    for node in graph.nodes:
        if not isinstance(node, Call) or id(node) not in chosen:
            nodes.append(node)
            continue
        calls, product = _product(graph, node)
        nodes += calls
        products.append(product)
    return needed(replace(graph, nodes=tuple(nodes))), tuple(products)


def _product(graph: LogicalGraph, bias: Call) -> tuple[list[Call], Call]:
    made = only_result(bias)

    def call(
        op: str, args: tuple[Any, ...], name: str, shape: tuple[int, ...], dtype: str = made.dtype
    ) -> Call:
        value = Value(f"{made.name}.{name}", shape, dtype)
        return bias.changed(op=op, args=args, kwargs=(), outputs=(value,))

    ids = bias.args[1]
    assert isinstance(ids, tuple)
    (chosen,) = ids
    numbers, table = graph.values[ref_name(chosen)], graph.values[ref_name(bias.args[0])]
    rows, experts = numbers.shape[0], table.shape[0]
    each = call("aten.unsqueeze.default", (chosen, 1), "each", (rows, 1), numbers.dtype)
    ones = call(ONES, (only_result(each).ref,), "ones", (rows, 1))
    ones = ones.changed(kwargs=(("dtype", Token("dtype", made.dtype)),))
    one = only_result(ones).ref
    wide = (experts, 1, made.shape[1])
    if bias.op == INDEX:
        cubic = call("aten.unsqueeze.default", (bias.args[0], 1), "apart", wide)
        product = bias.changed(op=EXPERT_MM, args=(one, only_result(cubic).ref, chosen, 0))
        return [each, ones, cubic, product], product
    product = call(EXPERT_GRADIENT, (one, bias.args[2], chosen, experts, 0), "apart", wide)
    flat = bias.changed(op="aten.squeeze.dim", args=(only_result(product).ref, 1), kwargs=())
    return [each, ones, product, flat], product
