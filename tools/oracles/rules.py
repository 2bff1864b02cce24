"""Check a sharding rule by running it: every declared signature on small shards against the whole result.

`check_call` also tries all other combinations of Split, Broadcast and Partial(sum) and reports
those that work although the rule misses them. A signature that works on one draw of random numbers
may still be wrong for others, and a missing one that works may work by chance; that it fails is
certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from tools.oracles.meanings import MEANINGS
from weft.errors import WeftError
from weft.layout import SBP, Broadcast, Partial, Split, shard_range
from weft.ops.call import OpCall, Operand, Signature, TensorSpec
from weft.ops.cost import dtype_name
from weft.ops.signatures import localize, signatures
from weft.runtime.channels.channel import reduce_in_order
from weft.runtime.torch_ops import to_torch, token, torch_op

# Their results are what memory held before: only shapes can be compared.
UNINITIALIZED = frozenset(
    f"aten.{name}" for name in ("empty.memory_format", "empty_like.default", "new_empty.default")
)
# Kernels that trust their arguments and may end the process on shards that do not fit together.
TRUSTING = ("attention", "nll_loss", "pool", "weft.")
LARGEST_SEARCH = 200  # combinations of operand SBPs


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of an op on real tensors, as torch takes it."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Report:
    """What `check_call` found.

    Attributes:
        op: the op.
        checked: the declared signatures that ran.
        mismatches: one line for each declared signature that is wrong: the signature, and what
            differs.
        missing: combinations that work although the rule does not declare them.
    """

    op: str
    checked: tuple[Signature, ...]
    mismatches: tuple[str, ...]
    missing: tuple[Signature, ...] = ()


def torch_call(op: str, *args: Any, **kwargs: Any) -> TorchCall:
    """`TorchCall` written like the call itself: `torch_call("aten.mm.default", x, w)`."""
    return TorchCall(op, args, tuple(kwargs.items()))


def check_call(
    call: OpCall | TorchCall, parts: int, seed: int = 0, search: bool = False, empty: bool = False
) -> Report:
    """Run every declared signature of a call on the shards of an axis of `parts` ranks.

    Args:
        call: a call on real tensors, or an `OpCall` for which random operands are drawn (integers
            are 0 or 1).
        parts: number of ranks.
        seed: of the random summands of Partial operands.
        search: also look for legal signatures that the rule misses.
        empty: also run the signatures that leave ranks with empty tensors.

    Raises:
        RuleError: when the op has no rule.
    """
    generator = torch.Generator().manual_seed(seed)
    sample = random_call(call, generator) if isinstance(call, OpCall) else call
    whole, tensors, expected = describe(sample)
    declared = signatures(whole, parts, empty)
    case = _Case(whole, tensors, expected, parts, generator)
    found = [(one, case.difference(one)) for one in declared]
    return Report(
        whole.op,
        declared,
        tuple(f"{whole.op} {one}: {what}" for one, what in found if what),
        tuple(_missing(case, declared)) if search else (),
    )


def describe(
    sample: TorchCall,
) -> tuple[OpCall, tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """The `OpCall` of a call on real tensors, its operands, and its results."""
    tensors: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(leaf(part) for part in value)
        if not isinstance(value, torch.Tensor):
            return token(value)
        known = [i for i, tensor in enumerate(tensors) if tensor is value]
        if not known:
            tensors.append(value)
        return Operand(known[0] if known else len(tensors) - 1)

    args = leaf(sample.args)
    kwargs = tuple((name, leaf(value)) for name, value in sample.kwargs)
    bare = OpCall(sample.op, args, kwargs, tuple(map(_spec, tensors)), ())
    results = run_call(bare, tensors)
    described = replace(bare, results=tuple(None if one is None else _spec(one) for one in results))
    return described, tuple(tensors), results


def random_call(call: OpCall, generator: torch.Generator) -> TorchCall:
    """The call with random operands: normal floats, integers and truth values 0 or 1."""
    tensors = [_random(spec, generator) for spec in call.operands]
    args = to_torch(call.args, tensors)
    return TorchCall(call.op, args, tuple((k, to_torch(v, tensors)) for k, v in call.kwargs))


def run_call(call: OpCall, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The results of a call on local tensors; None for those that are no tensors."""
    args = to_torch(call.args, tensors)
    kwargs = {name: to_torch(value, tensors) for name, value in call.kwargs}
    function = MEANINGS[call.op] if call.op in MEANINGS else torch_op(call.op)
    found = function(*args, **kwargs)
    results = found if isinstance(found, (tuple, list)) else (found,)
    return tuple(one if isinstance(one, torch.Tensor) else None for one in results)


@dataclass(frozen=True, eq=False)
class _Case:
    """One call with its whole operands and results, and the number of ranks to run it on."""

    call: OpCall
    tensors: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor | None, ...]
    parts: int
    generator: torch.Generator

    @property
    def tolerance(self) -> float:
        """How far results may differ."""
        return _tolerance((*self.tensors, *self.expected))

    def difference(self, signature: Signature) -> str:
        """What is wrong with a declared signature; empty when nothing is."""
        shards = self.shards(signature.operands)
        outcomes = []
        for index in range(self.parts):
            local = localize(self.call, signature, self.parts, index)
            given = [_spec(tensor) for tensor in shards[index]]
            if given != list(local.operands):
                return f"rank {index} should get {local.operands}, gets {given}"
            try:
                results = run_call(local, shards[index])
            except (RuntimeError, IndexError, ValueError, TypeError, WeftError) as error:
                return f"rank {index} raises {str(error).splitlines()[0]}"
            made = tuple(None if one is None else _spec(one) for one in results)
            if made != local.results:
                return f"rank {index} should make {local.results}, makes {made}"
            outcomes.append(results)
        return "" if self.call.op in UNINITIALIZED else self._compare(signature, outcomes)

    def _compare(self, signature: Signature, outcomes: list[tuple[Any, ...]]) -> str:
        for number, (whole, sbp) in enumerate(zip(self.expected, signature.results, strict=True)):
            pieces = [outcome[number] for outcome in outcomes]
            if whole is not None and not _agree(whole, pieces, sbp, self.tolerance):
                return f"result {number} differs from the whole"
        return ""

    def shards(self, sbps: Iterable[SBP]) -> list[list[torch.Tensor]]:
        """The operands of each rank."""
        return draw_shards(self.tensors, sbps, self.parts, self.generator)

    def outcomes(self, sbps: tuple[SBP, ...]) -> list[tuple[torch.Tensor | None, ...]] | None:
        """The results of each rank with unchanged arguments; None when it raises."""
        try:
            return [run_call(self.call, shards) for shards in self.shards(sbps)]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None


def draw_shards(
    tensors: Sequence[torch.Tensor], sbps: Iterable[SBP], parts: int, generator: torch.Generator
) -> list[list[torch.Tensor]]:
    """What each rank of an axis holds of all `tensors`; see `shards_of`."""
    pairs = zip(tensors, sbps, strict=True)
    by_tensor = [shards_of(tensor, sbp, parts, generator) for tensor, sbp in pairs]
    return [[pieces[index] for pieces in by_tensor] for index in range(parts)]


def shards_of(
    tensor: torch.Tensor, sbp: SBP, parts: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """What each rank of an axis holds of `tensor`; where it is Partial, random summands or values below (above)."""
    if isinstance(sbp, Split):
        ranges = (shard_range(tensor.shape[sbp.dim], parts, index) for index in range(parts))
        return [tensor.narrow(sbp.dim, offset, n).contiguous() for offset, n in ranges]
    if isinstance(sbp, Broadcast):
        return [tensor] * parts
    noise = [_noise(tensor, generator) for _ in range(parts)]
    if sbp.reduction == "sum":
        noise[-1] = tensor - torch.stack(noise[:-1]).sum(0) if parts > 1 else tensor
        return [piece.to(tensor.dtype) for piece in noise]
    owner = torch.randint(parts, tensor.shape, generator=generator)
    away = [piece.abs() if sbp.reduction == "min" else -piece.abs() for piece in noise]
    return [torch.where(owner == i, tensor, tensor + piece) for i, piece in enumerate(away)]


def _agree(whole: torch.Tensor, pieces: list[torch.Tensor], sbp: SBP, tolerance: float) -> bool:
    """Whether the pieces of all ranks make up the whole tensor."""
    if isinstance(sbp, Broadcast):
        return all(close(piece, whole, tolerance) for piece in pieces)
    if isinstance(sbp, Split):
        fits = all(
            shard.shape == piece.shape
            for shard, piece in zip(
                shards_of(whole, sbp, len(pieces), torch.Generator()), pieces, strict=True
            )
        )
        return fits and close(torch.cat(pieces, sbp.dim), whole, tolerance)
    if any(piece.shape != whole.shape for piece in pieces):
        return False
    if sbp.reduction == "sum":
        return whole.dtype != torch.bool and _same_sum(whole, torch.stack(pieces), tolerance)
    return close(reduce_in_order(pieces, sbp.reduction), whole, tolerance)


def _same_sum(whole: torch.Tensor, summands: torch.Tensor, tolerance: float) -> bool:
    """Whether the summands make up the whole; where some are infinite or nan, no sum can tell."""
    total = summands.sum(0).to(whole.dtype)
    finite = summands.isfinite().all(0)
    zero = torch.zeros((), dtype=whole.dtype)
    found, expected = torch.where(finite, total, zero), torch.where(finite, whole, zero)
    return close(found, expected, tolerance, scale=_largest(summands))


# Tolerance by the least precise dtype of a call.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


def _tolerance(tensors: Iterable[torch.Tensor | None]) -> float:
    known = [
        x.dtype for x in tensors if x is not None and (x.is_floating_point() or x.is_complex())
    ]
    return max((_TOLERANCE.get(dtype, 1e-4) for dtype in known), default=1e-4)


def close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float, scale: float = 1.0
) -> bool:
    """Whether two tensors have one shape and dtype and differ by no more than rounding; nan equals nan.

    Args:
        found: some tensor.
        expected: what it should be.
        tolerance: of each element, and of the largest one: sums of large numbers lose the digits of
            small ones.
        scale: the size of the numbers that were summed, where it is known to be larger.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(found, expected)
    scale = max(1.0, scale, _largest(expected))
    absolute = tolerance * min(scale, 1e30)
    return torch.allclose(found, expected, rtol=tolerance, atol=absolute, equal_nan=True)


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    size = tensor.abs().nan_to_num(0.0, 0.0, 0.0)
    return float(size.max()) if size.numel() else 0.0


def split_again(sample: TorchCall, parts: int) -> Iterator[TorchCall]:
    """What the second of `parts` ranks runs under each signature: calls that a further axis may split again."""
    whole, tensors, _ = describe(sample)
    generator = torch.Generator().manual_seed(0)
    for signature in signatures(whole, parts)[1:]:
        local = localize(whole, signature, parts, 1)
        shards = draw_shards(tensors, signature.operands, parts, generator)[1]
        kwargs = tuple((name, to_torch(value, shards)) for name, value in local.kwargs)
        yield TorchCall(local.op, to_torch(local.args, shards), kwargs)


def _missing(case: _Case, declared: tuple[Signature, ...]) -> Iterator[Signature]:
    """Combinations of operand SBPs that no declared signature has, and that work on two draws of summands."""
    known = {signature.operands for signature in declared}
    choices = [_choices(tensor, case.parts) for tensor in case.tensors]
    total = 1
    for options in choices:
        total *= len(options)
    if total > LARGEST_SEARCH or any(word in case.call.op for word in TRUSTING):
        return
    for sbps in product(*choices):
        if sbps not in known and (results := _results(case, sbps)):
            yield Signature(sbps, results)


def _choices(tensor: torch.Tensor, parts: int) -> list[SBP]:
    splits: list[SBP] = [Split(dim) for dim, size in enumerate(tensor.shape) if size >= parts]
    partial: list[SBP] = [Partial()] if tensor.is_floating_point() else []
    return [Broadcast(), *splits, *partial]


def _results(case: _Case, sbps: tuple[SBP, ...]) -> tuple[SBP, ...]:
    """The SBPs of the results under these SBPs of the operands; empty when they make up no whole."""
    draws = [case.outcomes(sbps) for _ in range(2)]
    if case.call.op in UNINITIALIZED or any(draw is None for draw in draws):
        return ()
    found: list[SBP] = []
    for number, whole in enumerate(case.expected):
        if whole is None:
            found.append(Broadcast())
            continue
        pieces = [[outcome[number] for outcome in draw] for draw in draws if draw]
        fitting = (
            sbp
            for sbp in _choices(whole, case.parts)
            if _all_agree(whole, pieces, sbp, case.tolerance)
        )
        chosen = next(fitting, None)
        if chosen is None:
            return ()
        found.append(chosen)
    return tuple(found)


def _all_agree(whole: torch.Tensor, draws: list[list[Any]], sbp: SBP, tolerance: float) -> bool:
    return all(_agree(whole, pieces, sbp, tolerance) for pieces in draws)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))


def _random(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(spec.shape, generator=generator, dtype=dtype)
    return torch.randint(2, spec.shape, generator=generator).to(dtype)


def _noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor.dtype)
