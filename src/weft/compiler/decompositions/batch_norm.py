"""BatchNorm on a split batch: one op for deduction, then several ops with a reduction between them.

Statistics are those of the whole batch, whatever the layout. Forward, ranks add up the moments of
their parts, [2, C]; backward, the gradients of weight and bias, which the gradient of the input
needs as well: one small reduction each. If only channels are split, or nothing, the fused ops
stay. Splits of positions, as of images by rows, count as splits of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import final

from weft.cached import cached_property
from weft.compiler.decompositions.decomposition import (
    DecomposableCall,
    Decomposition,
    Placed,
    SampleStatistics,
)
from weft.hardware import CostModel
from weft.ir.logical import Arg, Call, LogicalGraph, Ref, Value
from weft.layout import SBP, Broadcast, Layout, Partial, Split
from weft.ops import OpCall, Signature, TensorSpec
from weft.ops.call import Token
from weft.units import ITEM_SIZE, Bytes

_FOLLOWING = "aten._native_batch_norm_legit_functional.default"
_PLAIN = "aten.native_batch_norm.default"
_BACKWARD = "aten.native_batch_norm_backward.default"
_STATISTICS = "weft.batch_statistics"
_MOMENTS, _SUMS = "weft.batch_moments", "weft.batch_norm_sums"
_CHANNELS = 1  # the dimension


def _forward(call: Call | OpCall) -> bool:
    """True if a call is a BatchNorm in training, forward."""
    return call.op in (_FOLLOWING, _PLAIN) and call.args[5] is True


def _in_training(call: Call | OpCall) -> bool:
    return _forward(call) or (call.op == _BACKWARD and call.args[7] is True)


def _split_signature(call: OpCall, dim: int) -> Signature:
    """A BatchNorm in training whose input is split along `dim`, which is not that of the channels.

    Statistics, and gradients of weight and bias, are those of the whole batch.
    """
    shape = call.operands[0].shape

    def sbp(spec: TensorSpec | None) -> SBP:
        return Split(dim) if spec and spec.shape == shape else Broadcast()

    return Signature(tuple(map(sbp, call.operands)), tuple(map(sbp, call.results)))


def _signatures(call: OpCall, parts: int, empty: bool) -> tuple[Signature, ...]:
    if not _in_training(call):
        return ()
    sizes = enumerate(call.operands[0].shape)
    dims = (dim for dim, size in sizes if dim != _CHANNELS and (size >= parts or empty))
    return tuple(_split_signature(call, dim) for dim in dims)


def _cost(
    call: OpCall, signature: Signature, grid: tuple[int, ...], axis: int, model: CostModel
) -> float:
    """The cost of the reduction inside of a BatchNorm whose batch is split along `axis`; else 0."""
    if not _in_training(call) or not _over(signature.operands[0]):
        return 0.0
    numbers = 2 * call.operands[0].shape[_CHANNELS] * prod(grid) // grid[axis]
    itemsize = ITEM_SIZE["float64" if _forward(call) else call.operands[-1].dtype]
    return model.boxing(Bytes(2 * (grid[axis] - 1) * numbers * itemsize), 1)


def _over(sbp: SBP) -> bool:
    """True if statistics are taken over a dimension that is split so."""
    return isinstance(sbp, Split) and sbp.dim != _CHANNELS


def _expand(site: DecomposableCall) -> Iterator[Placed]:
    """One small reduction in between, where what is normalized is split differently from by channels."""
    if _in_training(site.call) and any(map(_over, site.reads[0].sbp)):
        parts = _BatchNormParts(site.graph, site.call, site.reads, site.values)
        yield from parts.backward() if site.call.op == _BACKWARD else parts.forward()


@final
@dataclass
class _BatchNormParts:
    """One BatchNorm decomposed; notes the layouts of what it makes in `values`."""

    graph: LogicalGraph
    node: Call
    reads: tuple[Layout, ...]
    values: dict[str, Layout]

    @cached_property
    def known(self) -> dict[str, Layout]:
        """The layouts in which operands are read: the call's own, and those of sums."""
        return dict(zip(self.node.operands, self.reads, strict=True))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input."""
        return self.graph.values[self.node.operands[0]].shape

    @property
    def count(self) -> int:
        """The number of elements of a channel."""
        return prod(self.shape) // max(1, self.shape[_CHANNELS])

    def forward(self) -> Iterator[Placed]:
        """The calls in order, each with the layouts in which it reads its operands."""
        x, weight, bias, running_mean, running_var, _, momentum, eps = self.node.args
        y, mean, rstd, *new = self.node.outputs
        assert y is not None
        assert mean is not None
        assert rstd is not None
        like = next(arg.name for arg in (weight, running_mean, x) if isinstance(arg, Ref))
        mean, rstd = (replace(one, dtype=self.graph.values[like].dtype) for one in (mean, rstd))
        moments = self._sums(y, "moments", "float64")
        yield self._call(_MOMENTS, (x,), moments)
        var = self._new(f"{y.name}.var", mean.shape, mean.dtype, self.values[mean.name])
        settings = (self.count, momentum, eps, Token("dtype", mean.dtype))
        args = (moments.ref, running_mean, running_var, *settings)
        made = (var, mean, rstd, *(new or (None, None)))
        yield self._call(_STATISTICS, args, *made)
        whole = Layout(self.reads[0].placement, (Broadcast(),) * len(self.reads[0].sbp))
        nothing = (self._new(f"{y.name}.{part}", (0,), mean.dtype, whole) for part in "mv")
        given = (mean.ref, var.ref, False, 0.0, eps)
        yield self._call(_PLAIN, (x, weight, bias, *given), y, *nothing)

    def backward(self) -> Iterator[Placed]:
        """The same for the backward."""
        grad, x, weight, _, _, mean, rstd, *_ = self.node.args
        to_input, *to_others = self.node.outputs
        assert isinstance(mean, Ref)  # made by the forward
        name = self.node.makes[0]
        sums = self._sums(name, "sums", self.graph.values[mean.name].dtype)
        yield self._call(_SUMS, (grad, x, mean, rstd), sums)
        total = sums.ref
        for row, made in enumerate(to_others):
            if made is not None:
                yield self._call("aten.select.int", (total, 0, row), made)
        if to_input is not None:
            args = (grad, x, weight, mean, rstd, total, self.count)
            yield self._call("weft.batch_norm_gradient", args, to_input)

    def _sums(self, of: Value, part: str, dtype: str) -> Value:
        """[2, C], a part on each rank; whoever reads it has the whole."""
        here = self.reads[0]
        sbps = tuple(Partial() if _over(sbp) else sbp for sbp in here.sbp)
        shape = (2, self.shape[_CHANNELS])
        made = self._new(f"{of.name}.{part}", shape, dtype, Layout(here.placement, sbps))
        whole = tuple(Broadcast() if _over(sbp) else sbp for sbp in here.sbp)
        self.known[made.name] = Layout(here.placement, whole)
        return made

    def _new(self, name: str, shape: tuple[int, ...], dtype: str, layout: Layout) -> Value:
        self.values[name] = layout
        return Value(name, shape, dtype)

    def _call(self, op: str, args: tuple[Arg, ...], *outputs: Value | None) -> Placed:
        call = self.node.changed(op=op, args=args, kwargs=(), outputs=outputs)
        names = call.operands
        return call, tuple(self.known.get(name) or self.values[name] for name in names)


FAMILY = Decomposition(
    ops=frozenset((_FOLLOWING, _PLAIN, _BACKWARD)),
    signatures=_signatures,
    cost=_cost,
    expand=_expand,
    statistics=SampleStatistics(
        name="BatchNorm",
        applies=_in_training,
        takes=_forward,
        adds=lambda call: call.op == _BACKWARD,
        over=lambda dim: dim != _CHANNELS,
        signature=_split_signature,
        size=lambda call: prod(call.operands[0].shape) // call.operands[0].shape[_CHANNELS],
        made_by=_STATISTICS,
        saved=(1, 2),  # mean, and 1 / standard deviation
    ),
)
