"""What one rank of a grid axis runs of a call."""

from __future__ import annotations

from dataclasses import replace

from weft.layout import SBP, Split, shard_range
from weft.ops.call import OpCall, Signature, TensorSpec
from weft.ops.rule import Cut, rule_of


def localize(call: OpCall, signature: Signature, parts: int, index: int) -> OpCall:
    """The call that rank `index` of an axis of `parts` ranks runs: local shapes, adapted arguments.

    For a grid of several axes, apply it axis by axis, outermost first, each on the result of the
    one before.

    Args:
        call: the call on whole tensors (whole along this axis).
        signature: one of `signatures(call, parts)`.

    Raises:
        RuleError: when the op has no rule.
    """
    rule = rule_of(call)
    local = replace(
        call,
        operands=tuple(
            _shard(spec, sbp, parts, index)
            for spec, sbp in zip(call.operands, signature.operands, strict=True)
        ),
        results=tuple(
            _shard(spec, sbp, parts, index) if spec else None
            for spec, sbp in zip(call.results, signature.results, strict=True)
        ),
    )
    return rule.adapt(local, Cut(call, signature, parts, index)) if rule.adapt else local


def _shard(spec: TensorSpec, sbp: SBP, parts: int, index: int) -> TensorSpec:
    if not isinstance(sbp, Split):
        return spec
    _, length = shard_range(spec.shape[sbp.dim], parts, index)
    return TensorSpec(spec.shape[: sbp.dim] + (length,) + spec.shape[sbp.dim + 1 :], spec.dtype)
