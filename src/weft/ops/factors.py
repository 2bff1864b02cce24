"""The factor notation: which dimensions of an op's operands and results are the same.

A factor names a dimension of the op's iteration space. Splitting it along a grid axis splits every
operand and result that carries it; operands without it are Broadcast. `"m k+, k n -> m n"` reads:

- terms separated by commas stand for the leading arguments of the op; those that are not tensors are
  skipped, and `_` may stand for one that never is. Right of the arrow stand the results.
- `k+` is contracted: results without it become Partial when it is split. A factor that some result
  lacks and that has no mark stays whole.
- `d!` is whole: never split. `1` is a dimension that is never split and has no name.
- `...` stands for any number of leading dimensions, aligned at the right; `...+` contracts them,
  `...!` keeps them whole.
- a tensor with fewer dimensions than its term has names carries the last ones, and a dimension of
  size 1 where others have more is not split: both as in broadcasting.

The notation follows the one-line sharding rules of nnScaler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import final

from weft.cached import cached_property
from weft.errors import RuleError
from weft.ops.call import OpCall, Operand, slot_specs

WHOLE = ""  # label of a dimension that no factor splits
ELLIPSIS = "..."

Dims = tuple[str, ...]


@final
@dataclass(frozen=True)
class Factors:
    """The factor of each dimension of one call's tensors.

    Attributes:
        operands: for each slot (place of a tensor in the arguments), the factor of each dimension.
        results: the same for each result; `()` for one that is not a tensor.
        contracted: factors whose split makes results without them Partial.
        whole: factors that are never split.
        hidden: (factor, size) of sizes that are in no shape but must be split with the factor,
            such as the number of groups of a convolution.
        filled: factors of which every rank needs an element.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    contracted: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    hidden: tuple[tuple[str, int], ...] = ()
    filled: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The factors in order of first appearance, results first."""
        labels = (name for dims in (*self.results, *self.operands) for name in dims)
        return tuple(dict.fromkeys(name for name in labels if name != WHOLE))


@final
@dataclass(frozen=True)
class Equation:
    """A parsed factor notation, before it meets a call."""

    operands: tuple[Dims | None, ...]
    results: tuple[Dims, ...]
    contracted: frozenset[str]
    whole: frozenset[str]


@cache
def parse_factors(text: str) -> Equation:
    """Parse the factor notation.

    Raises:
        RuleError: when `text` has no arrow, or a name is not an identifier.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f'a rule reads like "m k+, k n -> m n"; found no "->" in {text!r}')
    marked = text.replace(",", " ").replace("->", " ").split()
    for token in marked:
        name = token[:-1] if token.endswith(("+", "!")) else token
        if not (name in (ELLIPSIS, "1", "_") or name.isidentifier()):
            raise RuleError(
                f"{token!r} in the rule {text!r} is not a factor; write k, k+, k!, ... or 1"
            )
    return Equation(
        tuple(None if term.strip() == "_" else _dims(term) for term in left.split(",")),
        tuple(_dims(term) for term in right.split(",")),
        frozenset(token[:-1] for token in marked if token.endswith("+")),
        frozenset(token[:-1] for token in marked if token.endswith("!")),
    )


def bind(text: str, call: OpCall) -> Factors:
    """The factors of `call` under the notation `text`.

    Raises:
        RuleError: when the numbers of tensors or dimensions do not fit.
    """
    equation = parse_factors(text)
    terms = [
        term
        for term, argument in zip(equation.operands, call.args, strict=False)
        if isinstance(argument, Operand) and term is not None
    ]
    specs = slot_specs(call)
    if len(terms) != len(specs) or len(equation.results) != len(call.results):
        raise RuleError(
            f"the rule {text!r} of {call.op} does not fit a call with {len(specs)} tensors and "
            f"{len(call.results)} results; write one term for each, in their order"
        )
    operands = (_spread(term, len(spec.shape)) for term, spec in zip(terms, specs, strict=True))
    results = (
        _spread(term, len(spec.shape)) if spec else ()
        for term, spec in zip(equation.results, call.results, strict=True)
    )
    factors = Factors(tuple(operands), tuple(results))
    marked = {name: name.split("@")[0] for name in factors.names}
    contracted = {name for name, base in marked.items() if base in equation.contracted}
    whole = {name for name, base in marked.items() if base in equation.whole}
    whole |= _missing(call, factors) - contracted
    return Factors(factors.operands, factors.results, frozenset(contracted), frozenset(whole))


def _missing(call: OpCall, factors: Factors) -> set[str]:
    made = [
        set(dims)
        for dims, spec in zip(factors.results, call.results, strict=True)
        if spec and 0 not in spec.shape
    ]
    return {name for name in factors.names for dims in made if name not in dims}


def whole_factors(call: OpCall) -> Factors:
    """No dimension may be split: only the all-Broadcast signature."""
    return Factors(
        tuple((WHOLE,) * len(spec.shape) for spec in slot_specs(call)),
        tuple((WHOLE,) * len(spec.shape if spec else ()) for spec in call.results),
    )


def without_broadcasts(call: OpCall, factors: Factors) -> Factors:
    """The same factors, but dimensions of size 1 that are stretched to a larger one carry none."""
    sizes = factor_sizes(call, replace(factors, hidden=()))

    def keep(name: str, size: int) -> str:
        return WHOLE if name and size == 1 and sizes[name] != (1,) else name

    kept = [
        tuple(keep(name, size) for name, size in zip(dims, shape, strict=True))
        for dims, shape in zip((*factors.operands, *factors.results), _shapes(call), strict=True)
    ]
    count = len(factors.operands)
    return replace(factors, operands=tuple(kept[:count]), results=tuple(kept[count:]))


def factor_sizes(call: OpCall, factors: Factors) -> dict[str, tuple[int, ...]]:
    """The different sizes of the dimensions that carry each factor; a 1 only where there is no other.

    More than one size is left where a view merges or splits dimensions.
    """
    found: dict[str, set[int]] = {name: set() for name in factors.names}
    for dims, shape in zip((*factors.operands, *factors.results), _shapes(call), strict=True):
        for name, size in zip(dims, shape, strict=True):
            if name != WHOLE:
                found[name].add(size)
    sizes = {name: known - {1} or {1} for name, known in found.items()}
    for name, size in factors.hidden:
        sizes[name] = sizes[name] | {size}
    return {name: tuple(sorted(known)) for name, known in sizes.items()}


def _shapes(call: OpCall) -> list[tuple[int, ...]]:
    shapes = [spec.shape for spec in slot_specs(call)]
    return shapes + [spec.shape if spec else () for spec in call.results]


def _dims(term: str) -> Dims:
    return tuple(WHOLE if token == "1" else token.rstrip("+!") for token in term.split())


def _spread(term: Dims, rank: int) -> Dims:
    """The factors of a tensor of `rank` dimensions: "..." becomes "...@1", "...@0", counted from the right."""
    if ELLIPSIS in term:
        before, after = term[: term.index(ELLIPSIS)], term[term.index(ELLIPSIS) + 1 :]
        batch = max(rank - len(before) - len(after), 0)
        spread = tuple(f"{ELLIPSIS}@{i}" for i in reversed(range(batch)))
        term = before + spread + after
    if rank > len(term):
        raise RuleError(
            f"a rule names {len(term)} dimensions of a tensor that has {rank}; name each, or put ... in front"
        )
    return term[len(term) - rank :]
