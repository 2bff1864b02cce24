"""BatchNorm: fused where the batch is whole, and the parts that it is taken apart into where it is split.

The parts (`weft.compiler.families.batch_norm`): `weft.batch_moments(x)` are sums for each channel, which
ranks add up; `weft.batch_statistics` makes mean, variance and running statistics of them;
`aten.native_batch_norm` normalizes with these. Backward, `weft.batch_norm_sums` are what ranks add
up, and `weft.batch_norm_gradient` reads.
"""

from __future__ import annotations

from weft.ops.arguments import argument, slot_specs
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Factors
from weft.ops.rule import aten, rule
from weft.ops.rules.common import FIRST, channels, shape_of

# Positions of an image on a CPU: from so many on, statistics of each image and channel come first (2
# to 5 times faster); below so many, the backward runs with the channels last (4 to 8 times faster).
MANY_POSITIONS, FEW_POSITIONS = 64, 8


def _batch_norm_of(call: OpCall, training: bool, backward: bool) -> Factors:
    """Channels may be split; batch and positions only where statistics are not taken over them."""
    results = tuple(
        channels(shape) if shape != (0,) else (WHOLE,) for shape in map(shape_of, call.results)
    )
    operands = tuple(
        channels(spec.shape) if spec.shape != (0,) else (WHOLE,) for spec in slot_specs(call)
    )
    over = frozenset(name for dims in operands for name in dims if name not in ("c", WHOLE))
    return Factors(
        operands,
        results,
        contracted=over if backward and not training else frozenset(),
        whole=over if training else frozenset(),
    )


def _batch_norm_inference(call: OpCall) -> Factors:
    return _batch_norm_of(call, training=False, backward=False)


def _batch_norm(call: OpCall) -> Factors:
    return _batch_norm_of(call, bool(argument(call, 5, "training")), backward=False)


def _batch_norm_backward(call: OpCall) -> Factors:
    return _batch_norm_of(call, bool(argument(call, 7, "train")), backward=True)


def _sums(call: OpCall) -> Factors:
    """Two numbers for each channel, [2, C], are added up over batch and positions."""
    operands = tuple(channels(spec.shape) for spec in slot_specs(call))
    over = frozenset(name for dims in operands for name in dims if name != "c")
    return Factors(operands, ((WHOLE, "c"),), contracted=over)


def _statistics(call: OpCall) -> Factors:
    _, *running = slot_specs(call)
    results = tuple(("c",) if spec else () for spec in call.results)
    return Factors(((WHOLE, "c"), *(("c",) for _ in running)), results)


def _gradient(call: OpCall) -> Factors:
    *operands, _ = (channels(spec.shape) for spec in slot_specs(call))
    return Factors((*operands, (WHOLE, "c")), (operands[0],))


rule(aten("_native_batch_norm_legit_no_training"), _batch_norm_inference)
rule(aten("native_batch_norm _native_batch_norm_legit_functional"), _batch_norm)
rule(aten("native_batch_norm_backward"), _batch_norm_backward, linear=FIRST)
rule("weft.batch_moments", _sums)
rule("weft.batch_statistics", _statistics)
rule("weft.batch_norm_sums", _sums, linear=FIRST)
# Linear in the gradient and in the sums made of it, together; it rounds no more than the fused op.
rule("weft.batch_norm_gradient", _gradient, linear=((0, 5),), lossy=True)
