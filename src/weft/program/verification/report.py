"""The findings of a self-check, as text: which results agree, or the first that does not, with its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.capture import Captured
from weft.ir.logical import Call, Input, Location, Output, Update
from weft.program.verification.compare import Compared

_KINDS = {
    "output": "outputs",
    "gradient": "gradients",
    "buffer": "buffers",
    "parameter": "updated parameters",
    "state": "optimizer states",
}
DIFFERS = "a step of the plan does not give what a plain eager step of the same code gives"
LATER = f"in a second step, {DIFFERS}"
CHANGES = "a plain eager step, run twice with the same values, gives two results, so that no plan can stand for it"
_FAULT = (
    "docs/soundness.md lists what weft takes over of the Python around a step; when this step keeps to it, the fault "
    "is weft's: please report it with this text"
)
_HELP = {
    DIFFERS: _FAULT,
    LATER: _FAULT,
    CHANGES: "Pass what changes from call to call in the batch (docs/soundness.md); where kernels add up in any order, "
    "call torch.use_deterministic_algorithms(True)",
}


@final
@dataclass(frozen=True)
class Verified:
    """A step of the plan that gave the same as a plain eager step.

    Attributes:
        compared: every output, metric, gradient, written buffer, updated parameter and optimizer state.
    """

    compared: tuple[Compared, ...]

    def largest(self, kind: str) -> Compared | None:
        """Of a kind, what differs most, relative to the largest element; None where there is none of it."""
        own = [each for each in self.compared if each.kind == kind]
        return max(own, key=_relative, default=None)

    def __str__(self) -> str:
        lines = ["the step gives what a plain eager step gives; largest differences by rounding:"]
        for kind, text in _KINDS.items():
            worst = self.largest(kind)
            count = sum(each.kind == kind for each in self.compared)
            if worst is not None:
                lines.append(f"  {count} {text}: {_numbers(worst)} ({worst.name})")
        return "\n".join(lines)


def places(captured: Captured) -> dict[tuple[str, str], tuple[int, Location | None]]:
    """By kind and name, the place of a result in the captured step, and the user's line that it is made for."""
    graph = captured.graph
    order = {id(node): place for place, node in enumerate(graph.nodes)}

    def of(name: str) -> tuple[int, Location | None]:
        node = graph.producers[name]
        return order[id(node)], node.location if isinstance(node, Call) else None

    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    found = {("output", node.key): of(node.value.name) for node in graph.of_kind(Output)}
    for update in graph.of_kind(Update):
        kind = "buffer" if update.rule == "copy" else "gradient"
        found[kind, keys[update.target.name]] = of(update.source.name)
    return found


def in_order(compared: Sequence[Compared], captured: Captured) -> list[Compared]:
    """As the step computes them: what is computed of others stands behind them; updates come last."""
    known = places(captured)
    last = (len(captured.graph.nodes), None)

    def place(each: Compared) -> tuple[bool, int]:
        updates = each.kind in ("parameter", "state")
        return updates, known.get((each.kind, each.name), last)[0]

    return sorted(compared, key=place)


def failure_text(compared: Sequence[Compared], captured: Captured, told: str) -> str:
    """The message about results of which some differ; empty where none does.

    Args:
        told: what it means that they differ: `DIFFERS`, `LATER` or `CHANGES`.
    """
    differing = [each for each in in_order(compared, captured) if not each.agrees]
    if not differing:
        return ""
    first, *others = differing
    where = places(captured).get((first.kind, first.name), (0, None))[1]
    text = f"{_name(first)} {first.text or _apart(first)}"
    text += f"; made at {where}" if where is not None else ""
    if others:
        shown = ", ".join(map(_name, others[:3])) + (", …" if len(others) > 3 else "")
        text += f". {len(others)} more differ that the step computes later: {shown}"
    agree = sum(each.agrees for each in compared)
    return f"{told}: {text}. {agree} results agree. {_HELP[told]}"


def _name(each: Compared) -> str:
    return (
        f"the {each.kind} {each.name}" if each.kind != "parameter" else f"the updated {each.name}"
    )


def _apart(each: Compared) -> str:
    return (
        f"differs by {each.difference:.1e}, rounding would make {each.allowed:.1e} at most, where the largest element "
        f"is {each.scale:.1e}"
    )


def _numbers(each: Compared) -> str:
    if each.scale <= each.allowed:
        return f"{each.difference:.1e}, {each.allowed:.1e} allowed"
    return f"{_relative(each):.1e} of the largest element, {each.allowed / each.scale:.1e} allowed"


def _relative(each: Compared) -> float:
    """Of the largest element; of what is allowed where that is more, as in what is zero but for rounding."""
    size = max(each.scale, each.allowed)
    return each.difference / size if size else 0.0
