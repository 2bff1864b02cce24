"""Step: one change of the SBP on one axis of a placement, and what it moves (OneFlow, Table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from weft.layout import SBP, Broadcast, Layout, Partial, Split
from weft.units import Bytes

StepKind: TypeAlias = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "slice",
    "pad",
    "keep_first",
    "reinterpret",
]
# Kinds in which ranks talk to each other; the others are local.
COLLECTIVES: frozenset[StepKind] = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of boxing: `source` and `target` differ in the SBP of `axis` only.

    `bytes` is what the step moves in total over all ranks of the placement; 0 for a local step.
    """

    kind: StepKind
    axis: int
    source: Layout
    target: Layout
    bytes: Bytes


def step_kind(source: SBP, target: SBP, parts: int) -> StepKind | None:
    """What takes one axis of `parts` ranks from `source` to another SBP in one step; None when nothing does.

    Along an axis of one rank every SBP means the same. Broadcast is Partial(max) and Partial(min) as it stands;
    Partial(sum) comes from zeros (around the piece, or in place of the value), which mean nothing to a max.
    """
    if parts == 1:
        return "reinterpret"
    match source, target:
        case Split(), Split():
            return "all_to_all"
        case Split(), Broadcast():
            return "all_gather"
        case Split(), Partial("sum"):
            return "pad"
        case Broadcast(), Split():
            return "slice"
        case Broadcast(), Partial(reduction):
            return "keep_first" if reduction == "sum" else "reinterpret"
        case Partial(), Broadcast():
            return "all_reduce"
        case Partial(), Split():
            return "reduce_scatter"
    return None


def step_bytes(kind: StepKind, parts: int, tensor_bytes: int) -> Bytes:
    """Bytes that one group of `parts` ranks moves in total when it holds a tensor of `tensor_bytes` (Table 2)."""
    match kind:
        case "all_reduce":
            return Bytes(2 * (parts - 1) * tensor_bytes)
        case "all_gather" | "reduce_scatter":
            return Bytes((parts - 1) * tensor_bytes)
        case "all_to_all":
            return Bytes((parts - 1) * tensor_bytes // parts)
        case _:
            return Bytes(0)


def axis_bytes(source: SBP, target: SBP, parts: int, tensor_bytes: int) -> Bytes:
    """Bytes moved along one axis of `parts` ranks from `source` to `target` (Table 2, same devices).

    `tensor_bytes` is the size of the tensor that one group along the axis holds together.
    """
    kinds = _axis_kinds(source, target, parts)
    return Bytes(sum(step_bytes(kind, parts, tensor_bytes) for kind in kinds))


def axis_collectives(source: SBP, target: SBP, parts: int) -> int:
    """How many collectives one axis of `parts` ranks needs from `source` to `target`."""
    return sum(kind in COLLECTIVES for kind in _axis_kinds(source, target, parts))


def _axis_kinds(source: SBP, target: SBP, parts: int) -> tuple[StepKind, ...]:
    if source == target:
        return ()
    kind = step_kind(source, target, parts)
    if kind is not None:
        return (kind,)
    # Split to Partial(max), and one reduction to another, go through Broadcast.
    return _axis_kinds(source, Broadcast(), parts) + _axis_kinds(Broadcast(), target, parts)
