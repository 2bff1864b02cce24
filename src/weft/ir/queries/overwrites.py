"""Results that are written over an operand which nobody reads later: of logits, log-probabilities and their gradients.

All three have as many elements as there are samples times classes, which is often the largest tensor of a step. The
kernels read each element before they write it. So a cross-entropy takes one such tensor where it took two at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weft.ir.plan import LocalCall
from weft.ir.queries.alias import view_bases

SOFTMAX, BACKWARD = "aten._log_softmax.default", "weft.cross_entropy_backward"
# Of the ops that may write over an operand, which one it is.
_OVER = {SOFTMAX: 0, BACKWARD: 1}
# Ops whose results are dense, in the order of their dimensions.
_DENSE = frozenset(
    ("aten.mm.default", "aten.addmm.default", "weft.large_mm", "weft.large_addmm", SOFTMAX)
)


def overwritten(calls: Sequence[LocalCall], leaving: Collection[str]) -> dict[int, str]:
    """The operands that calls of a segment may write their results over, by the places of the calls.

    The log-softmax is one of a loss whose backward is joined, which only CPUs have.

    Args:
        calls: in the order in which they run.
        leaving: names of the values that are there when they have run.
    """
    backward = {call.operands[1] for call in calls if call.op == BACKWARD}
    if not backward:
        return {}
    bases = view_bases(calls)
    makers = {value.name: call for call in calls for value in call.makes}
    last = {bases.get(name, name): place for place, call in enumerate(calls) for name in call.reads}
    stay = {bases.get(name, name) for name in leaving}
    found = {}
    for place, call in enumerate(calls):
        if call.op not in _OVER or (call.op == SOFTMAX and call.makes[0].name not in backward):
            continue
        operand = call.operands[_OVER[call.op]]
        base = bases.get(operand, operand)
        dense = base in makers and makers[base].op in _DENSE
        if dense and last[base] == place and base not in stay and _alike(call, operand, makers):
            found[place] = operand
    return found


def with_overwrites(
    bases: Mapping[str, str], calls: Sequence[LocalCall], over: Mapping[int, str]
) -> dict[str, str]:
    """For each value that shares memory, the one that first had it: views, and results written over operands.

    Args:
        bases: of views.
        calls: in their order.
        over: the operands that calls write over, by place.
    """
    found = dict(bases)
    for place in sorted(over):
        made, operand = calls[place].makes[0].name, over[place]
        root = found.get(operand, operand)
        found |= {name: root for name, base in found.items() if base == made}
        found[made] = root
    return found


def _alike(call: LocalCall, operand: str, makers: Mapping[str, LocalCall]) -> bool:
    """True where the operand and the result have the same shape and dtype."""
    (made,) = call.makes
    (read,) = (value for value in makers[operand].makes if value.name == operand)
    return (made.shape, made.dtype) == (read.shape, read.dtype)
