"""Before a batch is cut in time: what only borrows a shape or a device stands alone, and so do counts of targets.

Sums over a leaf of the batch, once a step: of the leaf as it is cut, so that no rank has to gather it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import TypeAlias

from weft.compiler.calls import operand_names
from weft.compiler.layouts.box import renamed
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.call import Token
from weft.ops.rule import factors_of
from weft.ops.rules.common import pointwise
from weft.ops.rules.views import reshape_factors

# Ops that take device, dtype or shape from a tensor whose values do not matter; what each is
# without it, and where its value stands in the arguments.
_BORROWERS: dict[str, tuple[str, int | None]] = {
    "aten.new_zeros.default": ("aten.zeros.default", None),
    "aten.new_ones.default": ("aten.ones.default", None),
    "aten.new_empty.default": ("aten.empty.memory_format", None),
    "aten.new_full.default": ("aten.full.default", 2),
    "aten.zeros_like.default": ("aten.zeros.default", None),
    "aten.ones_like.default": ("aten.ones.default", None),
    "aten.empty_like.default": ("aten.empty.memory_format", None),
    "aten.full_like.default": ("aten.full.default", 1),
    "aten.zero.default": ("aten.zeros.default", None),
    "aten.fill.Scalar": ("aten.full.default", 1),
}
_SUM = 2  # torch's number for a reduction
_NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")

_NLL_GRADIENT = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")


def prepared(graph: LogicalGraph, device_type: str) -> LogicalGraph:
    """The same step, in which fewer values depend on others."""
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in graph.nodes:
        if not _ignores_count(node):
            node = renamed(node, names)
        if isinstance(node, Call) and node.op in _BORROWERS:
            node = _alone(node, device_type)
        if isinstance(node, Call) and node.op in _NLL and node.args[3] == _SUM:
            counting = tuple(_Counting(graph, node).calls())
            nodes += counting
            names |= _renaming(node, counting)
        nodes.append(node)
    return graph.with_nodes(nodes)


def _ignores_count(node: Node) -> bool:
    """The gradient of a sum takes the total weight, but does not look at it."""
    return isinstance(node, Call) and node.op in _NLL_GRADIENT and node.args[4] == _SUM


def _alone(node: Call, device_type: str) -> Call:
    """A call that makes the same from nothing."""
    op, position = _BORROWERS[node.op]
    (made,) = node.outputs
    assert made is not None  # all of them make a tensor
    device = dict(node.kwargs).get("device", Token("device", device_type))
    value = () if position is None else (node.args[position],)
    if any(isinstance(each, Ref) for each in value):
        return node
    kwargs = (("dtype", Token("dtype", made.dtype)), ("device", device))
    return replace(node, op=op, args=(made.shape, *value), kwargs=kwargs)


def _renaming(node: Call, counting: tuple[Call, ...]) -> dict[str, str]:
    """Readers of the total weight read what has been counted."""
    total, counted = node.outputs[1], counting[-1].outputs[0] if counting else None
    return {total.name: counted.name} if total and counted else {}


Calls: TypeAlias = Iterator[Call]


class _Counting:
    """The total weight of a negative log-likelihood's targets, from the targets alone."""

    def __init__(self, graph: LogicalGraph, node: Call) -> None:
        self.graph = graph
        self.node = node

    def calls(self) -> Calls:
        """The calls that count; none where nothing reads the total weight."""
        _, target, weight, _, ignored, *_ = self.node.args
        total = self.node.outputs[1]
        if total is None or not self.graph.users[total.name]:
            return
        assert isinstance(target, Ref)  # a loss has targets
        old = self.graph.values[target.name]
        counts = self._maker(old.shape)
        yield counts("counts", "bool", "aten.ne.Scalar", target, ignored)
        summed = "counts"
        if isinstance(weight, Ref):
            length = prod(old.shape)
            flat = (length,)
            counts = self._maker((length,))
            yield counts("flat", old.dtype, "aten.reshape.default", target, flat)
            yield counts("mask", "bool", "aten.reshape.default", self._ref("counts"), flat)
            mask, zero = self._ref("mask"), 0
            where = "aten.where.ScalarOther"
            yield counts("safe", old.dtype, where, mask, self._ref("flat"), zero)
            pick = (weight, 0, self._ref("safe"))
            yield counts("picked", total.dtype, "aten.index_select.default", *pick)
            yield counts("weights", total.dtype, where, mask, self._ref("picked"), zero)
            summed = "weights"
        add = self._maker(())("total", total.dtype, "aten.sum.default", self._ref(summed))
        yield replace(add, kwargs=(("dtype", Token("dtype", total.dtype)),))

    def _ref(self, part: str) -> Ref:
        total = self.node.outputs[1]
        assert total is not None  # calls() returned otherwise
        return Ref(f"{total.name}.{part}")

    def _maker(self, shape: tuple[int, ...]) -> Callable[..., Call]:
        def make(part: str, dtype: str, op: str, *args: Arg) -> Call:
            made = Value(self._ref(part).name, shape, dtype)
            return replace(self.node, op=op, args=args, kwargs=(), outputs=(made,))

        return make


_SUM_OP = "aten.sum.default"


def sum_of_leaf(
    graph: LogicalGraph, name: str, leaves: frozenset[str]
) -> tuple[str, tuple[Call, ...]] | None:
    """The leaf that `name` sums up, and the calls on its elements in between, the sum last.

    None when it is no such sum. Where elements stand does not matter to a sum, so views are left
    out.
    """
    node = graph.producers[name]
    if not isinstance(node, Call) or node.op != _SUM_OP:
        return None
    calls = [node]
    (current,) = operand_names(node)
    while current not in leaves:
        maker = graph.producers[current]
        if not isinstance(maker, Call) or not _keeps_elements(graph, maker):
            return None
        if factors_of(maker.op) is pointwise:
            calls.append(maker)
        (current,) = operand_names(maker)
    return current, tuple(reversed(calls))


def _keeps_elements(graph: LogicalGraph, node: Call) -> bool:
    """Whether a call makes one element of each element of its only operand."""
    operands = operand_names(node)
    if len(operands) != 1 or len(node.outputs) != 1 or node.outputs[0] is None:
        return False
    before, after = graph.values[operands[0]].shape, node.outputs[0].shape
    if factors_of(node.op) is reshape_factors:
        return prod(before) == prod(after)
    return factors_of(node.op) is pointwise and before == after
