"""Calls of one part of the batch: under which signature a call runs in parts, and what it is for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from weft.compiler.microbatch.forms import even_signatures
from weft.errors import RuleError
from weft.ir.logical import Arg, Ref
from weft.ir.plan import LocalCall, LocalValue
from weft.layout import Broadcast, Partial, Split
from weft.ops import OpCall, Operand, Signature, TensorSpec
from weft.ops.call import map_argument


def part_signature(call: OpCall, cut: Sequence[int | None], parts: int) -> Signature | None:
    """The signature along the batch under which operands are read as they are cut; None where there is none.

    Args:
        call: on whole operands.
        cut: for each operand the dimension along which it is cut; None for those that are whole.
        parts: how many.
    """
    try:
        fitting = [each for each in even_signatures(call, parts) if _fits(call, each, cut)]
    except RuleError:
        return None
    return min(fitting, key=lambda each: _summed(call, each), default=None)


def _fits(call: OpCall, signature: Signature, cut: Sequence[int | None]) -> bool:
    for sbp, dim in zip(signature.operands, cut, strict=True):
        if not isinstance(sbp, Split | Broadcast) or (dim is not None and sbp != Split(dim)):
            return False
    results = zip(signature.results, call.results, strict=True)
    if any(not isinstance(sbp, Split) and sbp != Partial("sum") for sbp, spec in results if spec):
        return False
    read = _elements(call.operands[i] for i, dim in enumerate(cut) if dim is not None)
    return _summed(call, signature) <= read


def _summed(call: OpCall, signature: Signature) -> int:
    """Elements of results that are sums over the batch: adding up the parts must not outweigh them."""
    pairs = zip(call.results, signature.results, strict=True)
    return _elements(spec for spec, sbp in pairs if spec and not isinstance(sbp, Split))


def _elements(specs: Iterable[TensorSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)


def part_call(node: LocalCall, call: OpCall, reads: Sequence[str], number: int) -> LocalCall:
    """The call that one part runs for a call of the batch."""

    def back(leaf: Any) -> Any:
        return Ref(reads[leaf.index]) if isinstance(leaf, Operand) else leaf

    outputs = tuple(
        None if old is None or spec is None else _part(old, spec, number)
        for old, spec in zip(node.outputs, call.results, strict=True)
    )
    kwargs: tuple[tuple[str, Arg], ...] = tuple(
        (key, map_argument(back, arg)) for key, arg in call.kwargs
    )
    return LocalCall(call.op, map_argument(back, call.args), kwargs, outputs, node.phase)


def sum_of_parts(total: LocalValue, parts: int) -> Iterator[LocalCall]:
    """Calls that add up to `total` what the parts make of it."""
    so_far, *rest = (replace(total, name=f"{total.name}.part{turn}") for turn in range(parts))
    for number, term in enumerate(rest, 1):
        last = number == len(rest)
        made = total if last else replace(total, name=f"{total.name}.sum{number}")
        args = (Ref(so_far.name), Ref(term.name))
        yield LocalCall("aten.add.Tensor", args, (), (made,))
        so_far = made


def _part(value: LocalValue, spec: TensorSpec, number: int) -> LocalValue:
    return LocalValue(f"{value.name}.part{number}", spec.shape, spec.dtype)
