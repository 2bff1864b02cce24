"""BatchNorm whose batch is split: one op for deduction, several with a reduction between them when it is split.

Statistics are those of the whole batch, whatever the layout. Forward, ranks add up the moments of
their parts, [2, C]; backward, the gradients of weight and bias, which the gradient of the input
needs as well: one small reduction each. Where only channels are split, or nothing, the fused ops
stay. Splits of positions, as of images by rows, count as splits of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from weft.compiler.assignment import Assignment
from weft.compiler.calls import operand_names
from weft.hardware import CostModel
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.layout import SBP, Broadcast, Layout, Partial, Split
from weft.ops import OpCall, Signature, TensorSpec
from weft.ops.call import Token
from weft.units import ITEM_SIZE, Bytes

_FOLLOWING = "aten._native_batch_norm_legit_functional.default"
_PLAIN = "aten.native_batch_norm.default"
BACKWARD = "aten.native_batch_norm_backward.default"
STATISTICS = "weft.batch_statistics"
_CHANNELS = 1  # the dimension

# A call and the layouts in which it reads its operands.
_Placed: TypeAlias = "tuple[Call, tuple[Layout, ...]]"


def takes_statistics(call: Call | OpCall) -> bool:
    """Whether a call is a BatchNorm in training, forward."""
    return call.op in (_FOLLOWING, _PLAIN) and call.args[5] is True


def is_batch_norm(call: Call | OpCall) -> bool:
    """Whether a call is a BatchNorm in training, forward or backward."""
    return takes_statistics(call) or (call.op == BACKWARD and call.args[7] is True)


def split_signature(call: OpCall, dim: int) -> Signature:
    """A BatchNorm in training whose input is split along `dim`, which is not that of the channels.

    Statistics, and gradients of weight and bias, are those of the whole batch.
    """
    shape = call.operands[0].shape

    def sbp(spec: TensorSpec | None) -> SBP:
        return Split(dim) if spec and spec.shape == shape else Broadcast()

    return Signature(tuple(map(sbp, call.operands)), tuple(map(sbp, call.results)))


def split_signatures(call: OpCall, parts: int, empty: bool) -> tuple[Signature, ...]:
    """What a BatchNorm in training allows besides what its rule says."""
    if not is_batch_norm(call):
        return ()
    sizes = enumerate(call.operands[0].shape)
    dims = (dim for dim, size in sizes if dim != _CHANNELS and (size >= parts or empty))
    return tuple(split_signature(call, dim) for dim in dims)


def statistics_cost(
    call: OpCall, signature: Signature, grid: tuple[int, ...], axis: int, model: CostModel
) -> float:
    """What the reduction inside of a BatchNorm costs whose batch is split along `axis`; else 0."""
    if not is_batch_norm(call) or not _over(signature.operands[0]):
        return 0.0
    numbers = 2 * call.operands[0].shape[_CHANNELS] * prod(grid) // grid[axis]
    itemsize = ITEM_SIZE["float64" if takes_statistics(call) else call.operands[-1].dtype]
    return model.boxing(Bytes(2 * (grid[axis] - 1) * numbers * itemsize), 1)


def split_batch_norms(
    graph: LogicalGraph, assignment: Assignment
) -> tuple[LogicalGraph, Assignment]:
    """Take apart each BatchNorm that was given a layout that splits its batch."""
    values, operands = dict(assignment.values), {}
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        reads = assignment.operands.get(index)
        placed: list[tuple[Node, tuple[Layout, ...] | None]] = [(node, reads)]
        if isinstance(node, Call) and reads is not None and is_batch_norm(node):
            parts = _Parts(graph, node, reads, values)
            placed = list(parts.calls()) if parts.apart else placed
        for made, layouts in placed:
            if layouts is not None:
                operands[len(nodes)] = layouts
            nodes.append(made)
    taken = replace(assignment, values=values, operands=operands)
    return graph.with_nodes(nodes), taken


def _over(sbp: SBP) -> bool:
    """Whether statistics are taken over a dimension that is split so."""
    return isinstance(sbp, Split) and sbp.dim != _CHANNELS


@dataclass
class _Parts:
    """One BatchNorm taken apart; notes the layouts of what it makes in `values`."""

    graph: LogicalGraph
    node: Call
    reads: tuple[Layout, ...]
    values: dict[str, Layout]

    @property
    def apart(self) -> bool:
        """Whether what is normalized is split otherwise than by channels."""
        return any(map(_over, self.reads[0].sbp))

    def calls(self) -> Iterator[_Placed]:
        """The calls in order, each with the layouts in which it reads its operands."""
        self.known = dict(zip(operand_names(self.node), self.reads, strict=True))
        shape = self.graph.values[operand_names(self.node)[0]].shape
        self.shape, self.count = shape, prod(shape) // max(1, shape[_CHANNELS])
        yield from self._backward() if self.node.op == BACKWARD else self._forward()

    def _forward(self) -> Iterator[_Placed]:
        x, weight, bias, running_mean, running_var, _, momentum, eps = self.node.args
        y, mean, rstd, *new = self.node.outputs
        assert y is not None
        assert mean is not None
        assert rstd is not None
        like = next(arg.name for arg in (weight, running_mean, x) if isinstance(arg, Ref))
        mean, rstd = (replace(one, dtype=self.graph.values[like].dtype) for one in (mean, rstd))
        moments = self._sums(y, "moments", "float64")
        yield self._call("weft.batch_moments", (x,), moments)
        var = self._new(f"{y.name}.var", mean.shape, mean.dtype, self.values[mean.name])
        settings = (self.count, momentum, eps, Token("dtype", mean.dtype))
        args = (Ref(moments.name), running_mean, running_var, *settings)
        made = (var, mean, rstd, *(new or (None, None)))
        yield self._call(STATISTICS, args, *made)
        whole = Layout(self.reads[0].placement, (Broadcast(),) * len(self.reads[0].sbp))
        nothing = (self._new(f"{y.name}.{part}", (0,), mean.dtype, whole) for part in "mv")
        given = (Ref(mean.name), Ref(var.name), False, 0.0, eps)
        yield self._call(_PLAIN, (x, weight, bias, *given), y, *nothing)

    def _backward(self) -> Iterator[_Placed]:
        grad, x, weight, _, _, mean, rstd, *_ = self.node.args
        to_input, *to_others = self.node.outputs
        assert isinstance(mean, Ref)  # made by the forward
        name = next(value for value in self.node.outputs if value is not None)
        sums = self._sums(name, "sums", self.graph.values[mean.name].dtype)
        yield self._call("weft.batch_norm_sums", (grad, x, mean, rstd), sums)
        total = Ref(sums.name)
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

    def _call(self, op: str, args: tuple[Arg, ...], *outputs: Value | None) -> _Placed:
        call = replace(self.node, op=op, args=args, kwargs=(), outputs=outputs)
        names = operand_names(call)
        return call, tuple(self.known.get(name) or self.values[name] for name in names)
