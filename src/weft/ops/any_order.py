"""The ops that do not depend on the order of rows, found from their rules.

A factor that may be split says that the op works on blocks of it one by one, and joins or adds up
the results. If localizing needs no offset, the dimension may also be permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

from weft.ops.call import OpCall, slots
from weft.ops.factors import Dims, Factors
from weft.ops.rule import KNOWN_CALLS, Rule, aten, has_rule, rule_of

# Ops whose local arguments name sizes, or positions along one factor alone.
_SIZES = frozenset(aten("view _unsafe_view reshape expand flatten.using_ints unflatten.int"))
_SIZES |= frozenset(aten("squeeze squeeze.dim squeeze.dims"))
_POSITIONS = dict.fromkeys(aten("nll_loss_forward nll_loss_backward"), "c")
_POSITIONS |= dict.fromkeys(aten("embedding embedding_dense_backward"), "v")
_POSITIONS |= dict.fromkeys(("weft.expert_mm", "weft.expert_gradient"), "e")
_NONE: Mapping[int, int] = MappingProxyType({})

# For each operand and for each result, the dimension of the rows; None if it has none.
Rows: TypeAlias = tuple[tuple[int | None, ...], tuple[int | None, ...]]


def rows_of(
    call: OpCall, here: Mapping[int, int], rows: int, made: Mapping[int, int] = _NONE
) -> Rows | None:
    """The dimensions of the rows in the operands and results of a call that does not care about their order.

    Args:
        here: for some operands, the dimension of their rows.
        made: for some results, the dimension of their rows.
    """
    if not has_rule(call.op):
        return None
    return _rows_of(rule_of(call), call, tuple(here.items()), rows, tuple(made.items()))


@lru_cache(maxsize=KNOWN_CALLS)
def _rows_of(
    rule: Rule,
    call: OpCall,
    here: tuple[tuple[int, int], ...],
    rows: int,
    made: tuple[tuple[int, int], ...],
) -> Rows | None:
    # Others have local arguments that depend on where rows begin.
    if not (rule.adapt is None or call.op in _SIZES or call.op in _POSITIONS):
        return None
    factors, by_slot, dims = rule.bind(call), slots(call), dict(here)
    names = {
        factors.operands[slot][dims[operand]]
        for slot, operand in enumerate(by_slot)
        if operand in dims
    }
    names |= {factors.results[result][dim] for result, dim in made}
    names = {name for name in names if name and name not in factors.whole}
    if len(names) != 1:
        return None
    (name,) = names
    if name == _POSITIONS.get(call.op) or not _is_plain(call, factors, name, rows):
        return None
    wanted: dict[int, int | None] = {}
    for slot, operand in enumerate(by_slot):
        place = _place(factors.operands[slot], name)
        if wanted.setdefault(operand, place) != place or dims.get(operand, place) != place:
            return None
    operands = tuple(wanted[i] for i in range(len(call.operands)))
    return operands, tuple(_place(dims, name) for dims in factors.results)


def _is_plain(call: OpCall, factors: Factors, name: str, rows: int) -> bool:
    """True if a factor is the rows and nothing else wherever it stands."""
    specs = [call.operands[operand] for operand in slots(call)] + list(call.results)
    sizes = {
        size
        for dims, spec in zip((*factors.operands, *factors.results), specs, strict=True)
        if spec
        for label, size in zip(dims, spec.shape, strict=True)
        if label == name
    }
    twice = any(dims.count(name) > 1 for dims in (*factors.operands, *factors.results))
    return sizes == {rows} and not twice and name not in dict(factors.hidden)


def _place(dims: Dims, name: str) -> int | None:
    return dims.index(name) if name in dims else None
