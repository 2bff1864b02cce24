"""Log-softmax split by classes: one op for deduction, then several ops with a reduction between them.

log_softmax(x) = x - max x - log sum exp(x - max x): maxima and sums of the classes' shards
are sent, never a row of x. If the classes are whole, the op stays the fused one. This is how a
head split by classes trains (OneFlow's InsightFace: "softmax split"; Megatron-LM's vocabulary-parallel
cross-entropy).

The total weight of the targets depends on the batch alone, so with micro-batches it is computed
once per step, before the loop, and no micro-batch waits for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, final

from weft.compiler.decompositions.decomposition import (
    Count,
    DecomposableCall,
    Decomposition,
    Placed,
)
from weft.hardware import CostModel
from weft.ir.logical import Arg, Call, LogicalGraph, Ref, Value
from weft.layout import SBP, Broadcast, Layout, Partial, Reduction, Split
from weft.ops import OpCall, Signature
from weft.ops.call import Token, argument, normal_dim
from weft.ops.rules.losses import SUM
from weft.ops.signatures import uniform
from weft.units import ITEM_SIZE, Bytes

_FORWARD = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_BACKWARD = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")


FORWARD = "aten._log_softmax.default"
BACKWARD = "aten._log_softmax_backward_data.default"
# The part that others read too (`row_sums`).
_SUMS = "sums"
_ROWS = ("max", "sum", "log", _SUMS)
# Where the dimension is in the arguments, and how many reductions the op becomes.
_DIM = {FORWARD: 1, BACKWARD: 2}
_REDUCTIONS = {FORWARD: 2, BACKWARD: 1}
_EXACT = ("float32", "float64")  # half precision stays whole: the fused op sums it in float32


def row_sums(name: str) -> str:
    """The logarithms of the rows' sums of exponentials, [n, 1], of the log-softmax whose result is `name`."""
    return f"{name}.lse"


def _signatures(call: OpCall, parts: int, empty: bool) -> tuple[Signature, ...]:
    split = _split_by_classes(call)
    fits = split is not None and (empty or call.operands[0].shape[split.dim] >= parts)
    return (uniform(call, split),) if split and fits else ()


def _cost(
    call: OpCall, signature: Signature, grid: tuple[int, ...], axis: int, model: CostModel
) -> float:
    """A number for each row is sent for each reduction."""
    split = _split_by_classes(call)
    if split is None or signature != uniform(call, split):
        return 0.0
    spec, parts = call.operands[0], grid[axis]
    rows = prod(size for dim, size in enumerate(spec.shape) if dim != split.dim)
    groups = prod(ranks for other, ranks in enumerate(grid) if other != axis)
    rows, count = rows * ITEM_SIZE[spec.dtype], _REDUCTIONS[call.op]
    return model.boxing(Bytes(count * groups * 2 * (parts - 1) * rows), count)


def _expand(site: DecomposableCall) -> Iterator[Placed]:
    """Taken apart where an operand is split along the dimension of the softmax."""
    parts = LogSoftmax(site)
    if any(parts.split in layout.sbp for layout in site.reads):
        yield from parts.forward() if site.call.op == FORWARD else parts.backward()


def _split_by_classes(call: OpCall) -> Split | None:
    if call.op not in _DIM or not call.operands[0].shape:
        return None
    specs = (*call.operands, *call.results)
    if any(spec is None or spec.dtype not in _EXACT for spec in specs):
        return None
    dim: int = argument(call, _DIM[call.op], "dim")
    return Split(normal_dim(dim, len(call.operands[0].shape)))


@final
class LogSoftmax:
    """One log-softmax, or its backward, decomposed; notes the layouts of what it makes."""

    def __init__(self, site: DecomposableCall) -> None:
        self.node, self.reads, self.values = site.call, site.reads, site.values
        dim: Any = self.node.args[_DIM[self.node.op]]
        self.split = Split(normal_dim(dim, len(self.result.shape)))

    @property
    def result(self) -> Value:
        value = self.node.outputs[0]
        assert value is not None  # both ops return a tensor
        return value

    def statistics(self) -> Iterator[Placed]:
        """The logarithm of each row's sum of exponentials (`row_sums`)."""
        here, row = self.reads[0], self._over_classes(self.reads[0], Broadcast())
        x, top, total = self.node.args[0], self._made("max").ref, self._made("sum").ref
        yield self._reduce("aten.amax.default", x, "max", "max", here), (here,)
        made = self._over_classes(here, Partial("sum"))
        args = (x, top, self.split.dim)
        yield self._call("weft.sum_exp", args, "sum", made), (here, row)
        yield self._call("aten.log.default", (total,), "log", row), (row,)
        terms = (self._made("log").ref, top)
        yield self._call("aten.add.Tensor", terms, _SUMS, row), (row, row)

    def forward(self) -> Iterator[Placed]:
        """The calls in order, each with the layouts in which it reads its operands."""
        yield from self.statistics()
        here, row = self.reads[0], self._over_classes(self.reads[0], Broadcast())
        arguments = (self.node.args[0], self._made(_SUMS).ref)
        yield self._call("aten.sub.Tensor", arguments, "", here), (here, row)

    def backward(self) -> Iterator[Placed]:
        """The same for the backward."""
        gradient, output = self.node.args[:2]
        of_gradient, of_output = self.reads if len(self.reads) == 2 else self.reads * 2
        row = self._over_classes(of_gradient, Broadcast())
        yield (
            self._reduce("aten.sum.dim_IntList", gradient, "sum", "sum", of_gradient),
            (of_gradient,),
        )
        yield self._call("aten.exp.default", (output,), "exp", of_output), (of_output,)
        product = (self._made("exp").ref, self._made("sum").ref)
        yield self._call("aten.mul.Tensor", product, "product", of_gradient), (of_output, row)
        difference = (gradient, self._made("product").ref)
        yield self._call("aten.sub.Tensor", difference, "", of_gradient), (of_gradient, of_gradient)

    def _made(self, part: str) -> Value:
        """A result on the way: a number for each row, or all of the shape."""
        name = row_sums(self.result.name) if part == _SUMS else f"{self.result.name}.{part}"
        whole, dim = self.result, self.split.dim
        shape = (*whole.shape[:dim], 1, *whole.shape[dim + 1 :]) if part in _ROWS else whole.shape
        return Value(name, shape, whole.dtype)

    def _over_classes(self, layout: Layout, sbp: SBP) -> Layout:
        """`layout`, with `sbp` on the axes that split the classes."""
        sbps = tuple(sbp if one == self.split else one for one in layout.sbp)
        return Layout(layout.placement, sbps)

    def _reduce(self, op: str, x: Arg, part: str, reduction: Reduction, layout: Layout) -> Call:
        made = self._over_classes(layout, Partial(reduction))
        return self._call(op, (x, (self.split.dim,), True), part, made)

    def _call(self, op: str, args: tuple[Arg, ...], part: str, layout: Layout) -> Call:
        """A call whose result is called after the whole op's; the last has no `part` and is that result."""
        if not part:
            return self.node.changed(op=op, args=args, kwargs=())
        value = self._made(part)
        self.values[value.name] = layout
        return Call.of(op, args, (value,), location=self.node.location, phase=self.node.phase)


FAMILY = Decomposition(
    ops=frozenset((FORWARD, BACKWARD)), signatures=_signatures, cost=_cost, expand=_expand
)


def _counts(graph: LogicalGraph, call: Call) -> Iterator[Count]:
    total = call.outputs[1] if call.op in _FORWARD else None
    if total is not None and call.args[3] == SUM and graph.users[total.name]:
        yield total.name, tuple(_counting(graph, call, total))


def _counting(graph: LogicalGraph, node: Call, total: Value) -> Iterator[Call]:
    """The total weight of a negative log-likelihood's targets, from the targets alone; the sum last."""
    _, target, weight, _, ignored, *_ = node.args
    assert isinstance(target, Ref)  # a loss has targets
    old = graph.values[target.name]

    def call(
        part: str, shape: tuple[int, ...], dtype: str, op: str, *args: Arg
    ) -> tuple[Call, Ref]:
        made = Value(f"{total.name}.{part}", shape, dtype)
        return node.changed(op=op, args=args, kwargs=(), outputs=(made,)), made.ref

    counted, summed = call("counts", old.shape, "bool", "aten.ne.Scalar", target, ignored)
    yield counted
    if isinstance(weight, Ref):
        flat, where = (prod(old.shape),), "aten.where.ScalarOther"
        targets, every = call("flat", flat, old.dtype, "aten.reshape.default", target, flat)
        counts, mask = call("mask", flat, "bool", "aten.reshape.default", summed, flat)
        kept, safe = call("safe", flat, old.dtype, where, mask, every, 0)
        pick, picked = call(
            "picked", flat, total.dtype, "aten.index_select.default", weight, 0, safe
        )
        weighed, summed = call("weights", flat, total.dtype, where, mask, picked, 0)
        yield from (targets, counts, kept, pick, weighed)
    add, _ = call("total", (), total.dtype, "aten.sum.default", summed)
    yield add.changed(kwargs=(("dtype", Token("dtype", total.dtype)),))


NLL_LOSS = Decomposition(
    ops=frozenset((*_FORWARD, *_BACKWARD)),
    counts=_counts,
    ignores_counts=lambda call: call.op in _BACKWARD and call.args[4] == SUM,
)
