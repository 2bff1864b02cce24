"""The part of a call that one rank of a grid axis runs.

Where a dimension has fewer elements than there are ranks, some ranks hold nothing of it. Many
kernels refuse empty tensors, or even end the process; so such a rank runs `weft.blank` in place of
the op, which makes empty results, and for those that are reduced over the ranks the value that
changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from weft.layout import SBP, Broadcast, Partial, Split, neutral, shard_range
from weft.ops.call import Argument, OpCall, Operand, Signature, TensorSpec, Token, tensor_spec
from weft.ops.rule import Cut, rule_of

# `weft.blank(operands, (shape, dtype, fill) of each result, op)`: results of a rank without elements,
# in place of the op that other ranks run.
BLANK = "weft.blank"


def localize(call: OpCall, signature: Signature, parts: int, index: int) -> OpCall:
    """The call that rank `index` of an axis of `parts` ranks runs: local shapes, adapted arguments.

    For a grid of several axes, apply it axis by axis, outermost first, each on the result of the
    one before.

    Raises:
        RuleError: when the op has no rule.
    """
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
    cut = Cut(call, signature, parts, index)
    if call.op == BLANK or _has_nothing(cut):
        return _blank(local, cut)
    rule = rule_of(call)
    return rule.adapt(local, cut) if rule.adapt else local


def _has_nothing(cut: Cut) -> bool:
    """True where the rank holds nothing of a split operand and has nothing else to add to a sum either."""
    call, signature = cut.whole, cut.signature
    rule = rule_of(call)
    if rule.view or not call.operands:
        return False
    if rule.added and any(isinstance(sbp, Partial) for sbp in signature.operands):
        return False
    if any(
        spec and sbp == Broadcast() and 0 not in spec.shape
        for spec, sbp in zip(call.results, signature.results, strict=True)
    ):
        return False  # what does not depend on the factor, such as the gradient of a bias
    ports = zip(
        (*call.operands, *call.results), (*signature.operands, *signature.results), strict=True
    )
    return any(
        isinstance(sbp, Split) and 0 < spec.shape[sbp.dim] <= cut.index
        for spec, sbp in ports
        if spec
    )


def _blank(local: OpCall, cut: Cut) -> OpCall:
    before = local.args[1] if local.op == BLANK else (None,) * len(local.results)
    assert isinstance(before, tuple)
    made = tuple(
        _made(spec, sbp, old) if spec else None
        for spec, sbp, old in zip(local.results, cut.signature.results, before, strict=True)
    )
    operands = tuple(Operand(i) for i in range(len(local.operands)))
    op = local.args[2] if local.op == BLANK else local.op
    return OpCall(BLANK, (operands, made, op), (), local.operands, local.results)


def _made(spec: TensorSpec, sbp: SBP, before: Argument) -> Argument:
    """Shape, dtype and value of a result; `before`, what an outer axis made of it, had the value already."""
    fill = neutral(sbp.reduction, spec.dtype) if isinstance(sbp, Partial) else 0
    return (
        spec.shape,
        Token("dtype", spec.dtype),
        before[2] if isinstance(before, tuple) else fill,
    )


def _shard(spec: TensorSpec, sbp: SBP, parts: int, index: int) -> TensorSpec:
    if not isinstance(sbp, Split):
        return spec
    _, length = shard_range(spec.shape[sbp.dim], parts, index)
    return tensor_spec(spec.shape[: sbp.dim] + (length,) + spec.shape[sbp.dim + 1 :], spec.dtype)
