"""Step: one change of a layout, and what it moves (OneFlow, Table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from weft.layout import IDEMPOTENT, SBP, Broadcast, Layout, Partial, Split
from weft.units import Bytes

StepKind: TypeAlias = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "transfer",
    "slice",
    "pad",
    "keep_first",
    "reinterpret",
]
# Kinds in which ranks talk to each other; the others are local.
EXCHANGES: frozenset[StepKind] = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
)


@final
@dataclass(frozen=True, slots=True)
class BoxingStep:
    """One step of boxing.

    A "transfer" goes from one placement to another; its `axis` is -1, and no SBP before or after it
    is Partial. Every other kind stays on one placement and changes the SBP of `axis` only.

    `bytes` is what really crosses from one rank to another, over all ranks; 0 for a local step.
    """

    kind: StepKind
    axis: int
    source: Layout
    target: Layout
    bytes: Bytes


def step_kind(source: SBP, target: SBP, parts: int) -> StepKind | None:
    """The kind of step that takes one axis of `parts` ranks from `source` to `target`; None when no single step does.

    Along an axis of one rank every SBP means the same. Broadcast is Partial of an idempotent
    reduction as it stands; the others keep it on the first rank. Around a piece, and in place of
    the value, stands the reduction's neutral element.
    """
    if parts == 1:
        return "reinterpret"
    match source, target:
        case Split(), Split():
            return "all_to_all"
        case Split(), Broadcast():
            return "all_gather"
        case Split(), Partial():
            return "pad"
        case Broadcast(), Split():
            return "slice"
        case Broadcast(), Partial(reduction):
            return "reinterpret" if reduction in IDEMPOTENT else "keep_first"
        case Partial(), Broadcast():
            return "all_reduce"
        case Partial(), Split():
            return "reduce_scatter"
    return None


def step_bytes(kind: StepKind, parts: int, tensor_bytes: Bytes) -> Bytes:
    """Bytes that one group of `parts` ranks moves in total when it holds a tensor of `tensor_bytes` (Table 2).

    Exact, however uneven the pieces, but for an all_to_all, where it holds for even ones and is the
    upper bound.
    """
    match kind:
        case "all_reduce":
            return Bytes(2 * (parts - 1) * tensor_bytes)
        case "all_gather" | "reduce_scatter":
            return Bytes((parts - 1) * tensor_bytes)
        case "all_to_all":
            return Bytes((parts - 1) * tensor_bytes // parts)
        case _:
            return Bytes(0)


def axis_bytes(source: SBP, target: SBP, parts: int, tensor_bytes: Bytes) -> Bytes:
    """Bytes moved along one axis of `parts` ranks from `source` to `target` (Table 2, same devices).

    `tensor_bytes` is the size of the tensor that one group along the axis holds together. From one
    Partial to another it is reduced in pieces.
    """
    if source == target:
        return Bytes(0)
    kind = step_kind(source, target, parts) or "reduce_scatter"
    return step_bytes(kind, parts, tensor_bytes)
