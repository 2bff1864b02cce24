"""The forms of a value along the micro-batch axis, and the calls that run on them once per micro-batch.

A value is split, partial or broadcast along time, as over ranks, or different for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import TypeAlias, final

from weft.compiler.microbatch.facts import join_per_micro_batch
from weft.errors import InternalError
from weft.ir.arguments import applied
from weft.ir.logical import Call, Value
from weft.layout import SBP, Broadcast, Partial, Split
from weft.ops import OpCall, Signature, TensorSpec, localize, signatures


@final
@dataclass(frozen=True, slots=True)
class Own:
    """Every micro-batch has its own value of the whole shape, such as the mean of a BatchNorm.

    Rules see it as Broadcast.
    """

    def __str__(self) -> str:
        return "own"


@final
@dataclass(frozen=True, slots=True)
class Strided:
    """Split, in each of `outer` equal blocks of dimension `dim`: a view merged what stood before the batch with it."""

    dim: int
    outer: int


Form: TypeAlias = SBP | Own | Strided

# Costs of reading a value in another form, in elements. Making one value of all micro-batches
# lets no reader start before the last of them.
_BARRIER = 1000.0
_JOIN, _ADD, _WHOLE, _AVERAGE, _SLICE, _LIGHT = 4.0, 2.0, 1.0, 0.1, 0.01, 1e-6


@final
@dataclass(frozen=True)
class Source:
    """The facts of a value that a call reads.

    Attributes:
        form: as it is made; None for one that is made from nothing, in any form that is asked for.
        whole: true if it can be made whole, once a step, before any micro-batch.
        pieces: the dimensions along which a value made from nothing can be made in pieces.
        ready: true if it has been made whole of all micro-batches already.
    """

    spec: TensorSpec
    form: Form | None
    whole: bool = False
    pieces: frozenset[int] = frozenset()
    ready: bool = False


@final
@dataclass(frozen=True)
class Way:
    """A way for a call to run in micro-batches: a signature along time, of which Split may mean `Strided`."""

    signature: Signature
    outer: int = 1

    @property
    def operands(self) -> tuple[Form, ...]:
        """The forms in which it reads its operands."""
        return tuple(map(self._form, self.signature.operands))

    @property
    def results(self) -> tuple[Form, ...]:
        """The forms in which it makes its results; a Broadcast may turn out to be `Own`."""
        return tuple(map(self._form, self.signature.results))

    def _form(self, sbp: SBP) -> Form:
        return Strided(sbp.dim, self.outer) if isinstance(sbp, Split) and self.outer > 1 else sbp


def even_signatures(call: OpCall, parts: int) -> Iterator[Signature]:
    """The signatures of a call that cut every dimension into equal parts; the all-Broadcast one first."""
    for signature in signatures(call, parts):
        if all(size % parts == 0 for size in _cut_sizes(call, signature)):
            yield signature


def _cut_sizes(call: OpCall, signature: Signature) -> set[int]:
    """The sizes of the dimensions that a signature splits."""
    specs, sbps = (*call.operands, *call.results), (*signature.operands, *signature.results)
    pairs = zip(specs, sbps, strict=True)
    return {spec.shape[sbp.dim] for spec, sbp in pairs if spec and isinstance(sbp, Split)}


def ways(call: OpCall, sources: Sequence[Source], parts: int) -> Iterator[Way]:
    """All ways to run a call; the all-Broadcast one first."""
    forms = (source.form for source in sources)
    outers = {form.outer for form in forms if isinstance(form, Strided)}
    for signature in even_signatures(call, parts):
        yield Way(signature)
        sizes = _cut_sizes(call, signature)
        for outer in outers:
            # The op must do the same with each sample, wherever in the split dimension it stands.
            if len(sizes) == 1 and max(sizes) % (outer * parts) == 0:
                ends = (localize(call, signature, parts, part) for part in (0, parts - 1))
                if next(ends) == next(ends):
                    yield Way(signature, outer)


def form_of_view(
    form: Form, source: tuple[int, ...], target: tuple[int, ...], parts: int
) -> Split | Strided | None:
    """The form of a view with the shape `target` of a value of shape `source`, both whole.

    Elements are numbered row by row; the micro-batch is one digit of that number, with `before`
    blocks in front of it. The view has it in the only dimension where it is a digit again.
    """
    if not isinstance(form, Split | Strided) or not prod(target):
        return None
    before = prod(source[: form.dim]) * (form.outer if isinstance(form, Strided) else 1)
    for dim, size in enumerate(target):
        front = prod(target[:dim])
        outer = before // front
        if outer and before % front == 0 and size % (outer * parts) == 0:
            return Strided(dim, outer) if outer > 1 else Split(dim)
    return None


def cheapest_signature(candidates: Iterable[Way], sources: Sequence[Source], batch: int) -> Way:
    """The signature along micro-batches that fits the operands best; the first among equals.

    Args:
        batch: size of the whole batch: values without inputs that have it as their
            first dimension are made in pieces if possible.
    """

    def cost(way: Way) -> float:
        pairs = zip(sources, way.operands, strict=True)
        return sum(reading_cost(source, form, batch) for source, form in pairs)

    return min(candidates, key=cost)


def reading_cost(source: Source, wanted: Form, batch: int) -> float:
    """The cost of reading a value as `wanted`."""
    shape, form, parts = source.spec.shape, source.form, isinstance(wanted, Split | Strided)
    size = max(prod(shape), 1)
    if form is None:
        if wanted == Broadcast():
            return _LIGHT * (shape[:1] == (batch,)) * size
        if isinstance(wanted, Split) and wanted.dim in source.pieces:
            return 2 * _LIGHT * (shape[wanted.dim] != batch) * size
        return 3 * _LIGHT * size if parts else inf
    if form == wanted:
        return 0.0
    if not parts and wanted != Broadcast():
        averages = isinstance(form, Own) and wanted == Partial("sum")
        return _AVERAGE * size if averages and "float" in source.spec.dtype else inf
    cut = _SLICE * size if parts else 0.0
    if isinstance(form, Own | Broadcast):
        return cut
    if source.ready or source.whole:
        return (_SLICE if source.ready else _WHOLE) * size + cut
    return (_ADD if isinstance(form, Partial) else _JOIN) * size + _BARRIER + cut


def micro_call(node: Call, signature: Signature, reads: Sequence[Value], parts: int) -> Call:
    """`node` under a signature along time; the names of its outputs stay."""
    return reading(node, of_parts(node, signature, parts), reads)


def of_parts(node: Call, signature: Signature, parts: int) -> OpCall:
    """The call that runs once for each micro-batch, as rules see it; arguments may vary. See `micro_call`."""
    ends = tuple(localize(node.first, signature, parts, m) for m in (0, parts - 1))
    # All are alike when the first and the last are.
    alike = ends[0] == ends[1]
    every = ends if alike else [localize(node.first, signature, parts, m) for m in range(parts)]
    first = every[0]
    if any((one.op, one.results) != (first.op, first.results) for one in every):
        raise InternalError(
            f"{node.op} at {node.location}: its micro-batches are not calls of one op with results "
            "of one shape"
        )
    args = join_per_micro_batch(tuple(one.args for one in every))
    kwargs = join_per_micro_batch(tuple(one.kwargs for one in every))
    return replace(first, args=args, kwargs=kwargs)


def reading(node: Call, micro: OpCall, reads: Sequence[Value]) -> Call:
    """`micro` in place of `node`, with the values that its operands are; the names of its outputs stay."""
    outputs = tuple(
        Value(old.name, spec.shape, spec.dtype) if old and spec else None
        for old, spec in zip(node.outputs, micro.results, strict=True)
    )
    return replace(node, outputs=outputs, **applied(micro, [value.name for value in reads]))
