"""The negative log-likelihood: how much all its targets weigh is known from the batch alone.

In micro-batches the total weight is counted once a step, before the loop, so that no micro-batch
waits for the others. The gradient of a sum takes the total weight too, but does not look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import final

from weft.compiler.families.family import Count, Family
from weft.ir.logical import Arg, Call, LogicalGraph, Ref, Value
from weft.ops.call import Token
from weft.ops.rules.layers.loss import SUM

_FORWARD = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_BACKWARD = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")


def _counts(graph: LogicalGraph, call: Call) -> Iterator[Count]:
    total = call.outputs[1] if call.op in _FORWARD else None
    if total is not None and call.args[3] == SUM and graph.users[total.name]:
        yield total.name, tuple(_Counting(graph, call).calls())


def _ignores_counts(call: Call) -> bool:
    return call.op in _BACKWARD and call.args[4] == SUM


@final
class _Counting:
    """The total weight of a negative log-likelihood's targets, from the targets alone."""

    def __init__(self, graph: LogicalGraph, node: Call) -> None:
        self.graph = graph
        self.node = node

    def calls(self) -> Iterator[Call]:
        """The calls that count, the sum last."""
        _, target, weight, _, ignored, *_ = self.node.args
        total = self.node.outputs[1]
        assert isinstance(target, Ref)  # a loss has targets
        assert total is not None  # it is read
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
        assert total is not None  # it is read
        return Ref(f"{total.name}.{part}")

    def _maker(self, shape: tuple[int, ...]) -> Callable[..., Call]:
        def make(part: str, dtype: str, op: str, *args: Arg) -> Call:
            made = Value(self._ref(part).name, shape, dtype)
            return replace(self.node, op=op, args=args, kwargs=(), outputs=(made,))

        return make


FAMILY = Family(
    ops=frozenset((*_FORWARD, *_BACKWARD)), counts=_counts, ignores_counts=_ignores_counts
)
