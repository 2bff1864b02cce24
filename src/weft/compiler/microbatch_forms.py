"""The forms of a value along time: split, partial or broadcast as over ranks, or each micro-batch's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import TypeAlias

from weft.layout import SBP, Broadcast, Partial, Split
from weft.ops import OpCall, Signature, TensorSpec, signatures


@dataclass(frozen=True, slots=True)
class Own:
    """Every micro-batch has a value of its own of the whole shape, such as the mean in its BatchNorm.

    Rules see it as Broadcast.
    """

    def __str__(self) -> str:
        return "own"


Form: TypeAlias = SBP | Own

# Costs of reading a value in another form, in elements. Making one value of all micro-batches
# lets no reader start before the last of them.
_BARRIER = 1000.0
_JOIN, _WHOLE, _AVERAGE, _SLICE, _LIGHT = 4.0, 1.0, 0.1, 0.01, 1e-6


@dataclass(frozen=True)
class Source:
    """What is known of a value that a call reads.

    Attributes:
        spec: of the whole tensor.
        form: as it is made; None for one that is made from nothing, in any form that is asked for.
        whole: whether it can be made whole, once a step, before any micro-batch.
        pieces: the dimensions along which a value made from nothing can be made in pieces.
    """

    spec: TensorSpec
    form: Form | None
    whole: bool = False
    pieces: frozenset[int] = frozenset()


def even_signatures(call: OpCall, parts: int) -> Iterator[Signature]:
    """The signatures of a call that cut every dimension into equal parts; the all-Broadcast one first."""
    for signature in signatures(call, parts):
        ports = (
            *zip(call.operands, signature.operands, strict=True),
            *zip(call.results, signature.results, strict=True),
        )
        if all(
            spec.shape[sbp.dim] % parts == 0
            for spec, sbp in ports
            if spec and isinstance(sbp, Split)
        ):
            yield signature


def cheapest(candidates: Iterable[Signature], sources: Sequence[Source], batch: int) -> Signature:
    """The signature that fits the operands best as they are; the first of equals.

    Args:
        candidates: signatures of one call, the all-Broadcast one among them.
        sources: the operands.
        batch: size of the whole batch: values made from nothing that have it as their first
            dimension are made in pieces when they can be.
    """

    def cost(signature: Signature) -> float:
        pairs = zip(sources, signature.operands, strict=True)
        return sum(reading_cost(source, sbp, batch) for source, sbp in pairs)

    return min(candidates, key=cost)


def reading_cost(source: Source, wanted: SBP, batch: int) -> float:
    """What reading a value as `wanted` costs."""
    size = max(prod(source.spec.shape), 1)
    form = source.form
    if form is None:
        return _cost_from_nothing(source, wanted, batch) * size
    if form == wanted:
        return 0.0
    match wanted:
        case Broadcast():
            if isinstance(form, Own):
                return 0.0
            return _WHOLE * size if source.whole else _JOIN * size + _BARRIER
        case Split():
            return reading_cost(source, Broadcast(), batch) * (form != Broadcast()) + _SLICE * size
    averages = isinstance(form, Own) and wanted == Partial("sum") and "float" in source.spec.dtype
    return _AVERAGE * size if averages else inf


def _cost_from_nothing(source: Source, wanted: SBP, batch: int) -> float:
    match wanted:
        case Broadcast():
            return _LIGHT * (source.spec.shape[:1] == (batch,))
        case Split(dim=dim) if dim in source.pieces:
            return 2 * _LIGHT * (source.spec.shape[dim] != batch)
        case Split():
            return 3 * _LIGHT
    return inf
