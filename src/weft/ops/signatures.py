"""From a rule to the legal signatures of one call along one grid axis, and what each rank runs under one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from weft.layout import SBP, Broadcast, Partial, Reduction, Split, neutral, shard_range
from weft.layout.sbp import BITWISE, reductions_of
from weft.ops.call import (
    Argument,
    OpCall,
    Operand,
    Signature,
    TensorSpec,
    Token,
    operand_indices,
    slots,
    tensor_spec,
)
from weft.ops.cost import cast_is_lossless
from weft.ops.factors import factor_sizes
from weft.ops.rule import KNOWN_CALLS, Cut, Groups, Rule, rule_of


def signatures(call: OpCall, parts: int, empty: bool = False) -> tuple[Signature, ...]:
    """All legal signatures of `call` along one grid axis of `parts` ranks; the all-Broadcast one first.

    A factor may be split when it has at least `parts` elements; where a view merges or splits
    dimensions, the split dimensions must be divisible by `parts`, so that the shards agree.

    Args:
        empty: true if a factor may also be split that has fewer elements than there are ranks, so
            that some ranks run the op on empty tensors.

    Raises:
        RuleError: when the op has no rule.
    """
    return _signatures(rule_of(call), call, parts, empty)


def uniform(call: OpCall, sbp: SBP) -> Signature:
    """The signature under which all operands and results have one SBP."""
    return Signature((sbp,) * len(call.operands), (sbp,) * len(call.results))


@lru_cache(maxsize=KNOWN_CALLS)
def _signatures(rule: Rule, call: OpCall, parts: int, empty: bool) -> tuple[Signature, ...]:
    groups = _existing(rule.linear_groups(call), call)
    found: Iterable[Signature | None] = chain(
        (uniform(call, Broadcast()),),
        _splits(rule, call, parts, empty),
        (
            _partial(call, group, "sum")
            for group in groups
            if _sums(call, group) and (rule.lossy or _keeps(call, group))
        ),
        (
            _partial(call, group, reduction)
            for group in _existing(rule.monotone_groups(call), call)
            for reduction in rule.extrema
        ),
    )
    legal = tuple(one for one in found if one is not None)
    ignored = _at(call, rule.ignored_positions(call))
    freed = (_freed(call, one, ignored) for one in legal if ignored)
    every: Iterable[Signature] = (*legal, *freed)
    for slot in _at(call, rule.anyhow):
        operand = slots(call)[slot]
        sbps = tuple(_anyhow(call.operands[operand], parts, empty))
        every = [_placed(one, operand, sbp) for sbp in sbps for one in every]
    return tuple(dict.fromkeys(one for one in every if _sound(call, one)))


def _anyhow(spec: TensorSpec, parts: int, empty: bool) -> Iterator[SBP]:
    """All ways in which a tensor may be that nobody looks at."""
    yield Broadcast()
    yield from (Split(dim) for dim, size in enumerate(spec.shape) if size >= parts or empty)
    yield Partial()


def _placed(signature: Signature, operand: int, sbp: SBP) -> Signature:
    before, after = signature.operands[:operand], signature.operands[operand + 1 :]
    return Signature((*before, sbp, *after), signature.results)


def _freed(call: OpCall, signature: Signature, ignored: frozenset[int]) -> Signature:
    free = {operand for slot, operand in enumerate(slots(call)) if slot in ignored}
    operands = (
        Partial() if i in free and sbp == Broadcast() else sbp
        for i, sbp in enumerate(signature.operands)
    )
    return Signature(tuple(operands), signature.results)


def _splits(rule: Rule, call: OpCall, parts: int, empty: bool) -> Iterator[Signature | None]:
    factors = rule.bind(call)
    added = _at(call, rule.added)
    for name, sizes in factor_sizes(call, factors).items():
        if name in factors.whole or not _divides(
            sizes, parts, empty and name not in factors.filled
        ):
            continue
        partial: SBP = Partial(rule.reduction) if name in factors.contracted else Broadcast()
        operands = [
            _split(dims, name, partial if slot in added else Broadcast())
            for slot, dims in enumerate(factors.operands)
        ]
        results = [
            _split(dims, name, partial) if spec else Broadcast()
            for dims, spec in zip(factors.results, call.results, strict=True)
        ]
        # A rank that holds nothing of the factor cannot make a result that does not depend on it.
        if max(sizes) >= parts or not any(
            spec and 0 not in spec.shape and sbp == Broadcast()
            for spec, sbp in zip(call.results, results, strict=True)
        ):
            yield _merge(call, operands, results)


def _split(dims: tuple[str, ...], name: str, otherwise: SBP) -> SBP:
    return Split(dims.index(name)) if name in dims else otherwise


def _divides(sizes: tuple[int, ...], parts: int, empty: bool) -> bool:
    if len(sizes) == 1:
        return empty or sizes[0] >= parts
    return all(size % parts == 0 for size in sizes)


def _partial(call: OpCall, group: tuple[int, ...], reduction: Reduction) -> Signature | None:
    operands: list[SBP] = []
    for position, value in enumerate((*call.args, *(value for _, value in call.kwargs))):
        inside = position in group and position < len(call.args)
        for _ in operand_indices(value):
            operands.append(Partial(reduction) if inside else Broadcast())
    results = [Partial(reduction) if spec else Broadcast() for spec in call.results]
    return _merge(call, operands, results)


def _merge(call: OpCall, by_slot: list[SBP], results: list[Any]) -> Signature | None:
    """From slots to operands; None when one operand would need two SBPs."""
    by_operand: dict[int, SBP] = {}
    for operand, sbp in zip(slots(call), by_slot, strict=True):
        if by_operand.setdefault(operand, sbp) != sbp:
            return None
    operands = tuple(by_operand[i] for i in range(len(call.operands)))
    return Signature(operands, tuple(results))


def _existing(groups: Groups, call: OpCall) -> Groups:
    arguments = call.args
    return tuple(
        group
        for group in groups
        if any(list(operand_indices(arguments[i])) for i in group if i < len(arguments))
    )


def _sums(call: OpCall, group: tuple[int, ...]) -> bool:
    """True if Partial(sum) passes: a number other than 0 would be added once on every rank."""
    members = (call.args[i] for i in group if i < len(call.args))
    return not any(isinstance(value, (bool, int, float, complex)) and value for value in members)


def _keeps(call: OpCall, group: tuple[int, ...]) -> bool:
    """True if the results' dtypes hold every summand's values: rounding would lose bits that cancel in their sum."""
    given = {
        call.operands[operand].dtype
        for i in group
        if i < len(call.args)
        for operand in operand_indices(call.args[i])
    }
    made = {spec.dtype for spec in call.results if spec}
    return all(cast_is_lossless(operand, result) for result in made for operand in given)


def _at(call: OpCall, positions: tuple[int, ...]) -> frozenset[int]:
    by_slot = [i for i, value in enumerate(call.args) for _ in operand_indices(value)]
    return frozenset(slot for slot, position in enumerate(by_slot) if position in positions)


def _sound(call: OpCall, signature: Signature) -> bool:
    """Bool tensors have no sum, complex ones no largest and no smallest; torch adds no halves of complex numbers."""
    pairs = chain(
        zip(call.operands, signature.operands, strict=True),
        zip(call.results, signature.results, strict=True),
    )
    return not any(
        isinstance(sbp, Partial) and spec and not _reducible(spec.dtype, sbp.reduction)
        for spec, sbp in pairs
    )


def _reducible(dtype: str, reduction: Reduction) -> bool:
    if dtype == "bool":
        return reduction in BITWISE
    return dtype != "complex32" and reduction in reductions_of(dtype)


# The part of a call that one rank of a grid axis runs.
#
# If a dimension has fewer elements than there are ranks, some ranks hold nothing of it. Many
# kernels refuse empty tensors, or even end the process; so such a rank runs `weft.blank` in place of
# the op, which makes empty results, and for those that are reduced over the ranks the value that
# changes nothing.


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
    """True if the rank holds nothing of a split operand and has nothing else to add to a sum either."""
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
