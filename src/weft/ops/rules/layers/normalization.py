"""Normalizations with their backward ops, but BatchNorm. Statistics are taken over whole dimensions only."""

from __future__ import annotations

from typing import Any

from weft.ops.arguments import argument, slot_specs, with_arguments
from weft.ops.call import OpCall, Operand
from weft.ops.factors import WHOLE, Dims, Factors
from weft.ops.rule import Cut, aten, rule
from weft.ops.rules.common import FIRST, channels, numbered, shape_of


def _normalized(call: OpCall, shape: Any, contracted: bool) -> Factors:
    """Layer norm and RMS norm: leading dimensions are a batch, those of `shape` whole."""
    rank = max(len(spec.shape) for spec in call.operands)
    batch = rank - len(shape)

    def dims(tensor: tuple[int, ...]) -> Dims:
        if len(tensor) != rank:
            return (WHOLE,) * len(tensor)
        return tuple(f"d{i}" if i < batch else WHOLE for i in range(rank))

    return Factors(
        tuple(dims(spec.shape) for spec in slot_specs(call)),
        tuple(dims(shape_of(spec)) for spec in call.results),
        contracted=frozenset(numbered(batch)) if contracted else frozenset(),
    )


def _group_norm_of(call: OpCall, groups: int, backward: bool) -> Factors:
    """Split by batch, or by groups of channels: the channels of a group stay together."""

    def dims(shape: tuple[int, ...]) -> Dims:
        named = channels(shape, channel="g")
        return tuple(name if name in "ng" else WHOLE for name in named)

    return Factors(
        tuple(dims(spec.shape) for spec in slot_specs(call)),
        tuple(dims(shape_of(spec)) for spec in call.results),
        contracted=frozenset("n") if backward else frozenset(),
        hidden=(("g", groups),),
    )


def _adapt_group_norm(x: int, sizes: int) -> Any:
    """N, C, HxW, group stand from position `sizes` on; the input tensor at position `x`."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        operand = local.args[x]
        assert isinstance(operand, Operand)
        batch, channels = local.operands[operand.index].shape[:2]
        whole_channels, groups = local.args[sizes + 1], local.args[sizes + 3]
        assert isinstance(whole_channels, int)
        assert isinstance(groups, int)
        local_groups = groups * channels // whole_channels
        changes = {sizes: batch, sizes + 1: channels, sizes + 3: local_groups}
        return with_arguments(local, changes)

    return adapt


rule(
    aten("native_layer_norm _fused_rms_norm"),
    lambda call: _normalized(call, argument(call, 1, "normalized_shape"), contracted=False),
)
rule(
    aten("native_layer_norm_backward _fused_rms_norm_backward"),
    lambda call: _normalized(call, argument(call, 2, "normalized_shape"), contracted=True),
    linear=FIRST,
)
rule(
    aten("native_group_norm"),
    lambda call: _group_norm_of(call, argument(call, 6, "group"), backward=False),
    adapt=_adapt_group_norm(0, 3),
)
rule(
    aten("native_group_norm_backward"),
    lambda call: _group_norm_of(call, argument(call, 8, "group"), backward=True),
    linear=FIRST,
    adapt=_adapt_group_norm(1, 5),
)


# BatchNorm: fused where the batch is whole, and the parts that it is taken apart into where it is split.
#
# The parts (`weft.compiler.families.batch_norm`): `weft.batch_moments(x)` are sums for each channel, which
# ranks add up; `weft.batch_statistics` makes mean, variance and running statistics of them;
# `aten.native_batch_norm` normalizes with these. Backward, `weft.batch_norm_sums` are what ranks add
# up, and `weft.batch_norm_gradient` reads.


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


rule(
    aten("_native_batch_norm_legit_no_training"),
    lambda call: _batch_norm_of(call, training=False, backward=False),
)
rule(
    aten("native_batch_norm _native_batch_norm_legit_functional"),
    lambda call: _batch_norm_of(call, bool(argument(call, 5, "training")), backward=False),
)
rule(
    aten("native_batch_norm_backward"),
    lambda call: _batch_norm_of(call, bool(argument(call, 7, "train")), backward=True),
    linear=FIRST,
)
rule("weft.batch_moments", _sums)
rule("weft.batch_statistics", _statistics)
rule("weft.batch_norm_sums", _sums, linear=FIRST)
# Linear in the gradient and in the sums made of it, together; it rounds no more than the fused op.
rule("weft.batch_norm_gradient", _gradient, linear=((0, 5),), lossy=True)
