"""Comparison of the plan's results with a plain step, and its report as text.

How much rounding moves a result is measured: the plain step runs once more with every parameter
moved by one rounding, up or down at random. A gradient that is zero but for rounding moves as far as
it is large, and a long sum little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.capture import Captured
from weft.capture.batch import is_constant
from weft.ir import LogicalGraph
from weft.ir.logical import Call, Input, Location, Output, Update

# How many roundings of the largest element are allowed, and how often what a rounding of all parameters
# moves. With 16 bits both steps round at the same places, and sums inside of ops are float32.
_FULL, _HALF = (8, 8), (4, 2)
# For values that a step hands back as they are.
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class Compared:
    """A result of both steps.

    Attributes:
        kind: "output", "gradient", "buffer", "parameter" or "state"; `name` is the user's.
        difference: the largest, of the plan's and the plain one; `allowed`: what rounding may make.
        scale: the largest element of the plain one.
        text: what else differs; empty if numbers do.
    """

    kind: str
    name: str
    difference: float = 0.0
    allowed: float = 0.0
    scale: float = 0.0
    text: str = field(default="")

    @property
    def agrees(self) -> bool:
        """True if they are the same but for rounding."""
        return not self.text and self.difference <= self.allowed


@final
@dataclass(frozen=True)
class Rounding:
    """The size of one rounding in the coarsest dtype of a step; `least` may differ in what is zero but for that."""

    eps: float
    least: float = 0.0

    def of(self, size: float, moved: float = 0.0) -> float:
        """The largest difference allowed elements up to `size` that a rounding of all parameters moves by `moved`."""
        roundings, moves = _FULL if self.eps < torch.finfo(torch.float16).eps else _HALF
        return roundings * self.eps * size + moves * moved + self.least


def compare(
    kind: str, name: str, found: Any, expected: Any, noise: float, by: Rounding
) -> Compared:
    """Compare what the plan gives with what a plain step gives: a tensor, a plain value or None.

    `noise`: how far a rounding of all parameters moves it; `by`: what a rounding is.
    """
    if not isinstance(expected, Tensor):
        return Compared(kind, name, text=_plainly(found, expected))
    if not isinstance(found, Tensor):
        text = f"is {found!r} in the plan, and a tensor in the plain step"
        return Compared(kind, name, text="" if found is None and not largest(expected) else text)
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        text = f"is {_kind(found)} in the plan, and {_kind(expected)} in the plain step"
        return Compared(kind, name, text=text)
    exact = not (expected.is_floating_point() or expected.is_complex())
    allowed = by.of(0.0 if exact else largest(expected), noise)
    return Compared(kind, name, difference(found, expected), allowed, largest(expected))


def _plainly(found: Any, expected: Any) -> str:
    """The difference where a plain step gives no tensor; empty if there is none."""
    if isinstance(found, Tensor):
        if expected is None and not largest(found):
            return ""
        return f"is a tensor in the plan, and {expected!r} in the plain step"
    # A value other than a tensor or plain value is returned as None (`capture/batch.py`).
    handed = expected if is_constant(expected) else None
    alike = found == handed or (found != found and handed != handed)  # NaN is not itself
    if type(found) is type(handed) and alike:
        return ""
    return f"is {found!r} in the plan, as when it was captured, and {expected!r} now"


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; infinite where one is finite and the other is not."""
    if not one.numel():
        return 0.0
    a, b = _wide(one), _wide(other.to(one.device))
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill(same, 0.0)
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def largest(tensor: Tensor) -> float:
    """The absolute value of the largest finite element; 0 if there is none."""
    if not tensor.numel():
        return 0.0
    return float(_wide(tensor).abs().nan_to_num(nan=0.0, posinf=0.0).max())


def moved(
    values: Mapping[str, Tensor], parameters: Collection[str], eps: float, seed: int
) -> dict[str, Tensor]:
    """Move each value of `parameters` by `eps` of itself (at least by its dtype's), up or down, drawn by `seed`."""
    generator = torch.Generator().manual_seed(seed)

    def move(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
        return value + value * signs * max(eps, torch.finfo(value.dtype).eps)

    return {key: move(value) if key in parameters else value for key, value in values.items()}


def coarsest(graph: LogicalGraph, reduced: str | None) -> float:
    """The eps of the coarsest dtype of a captured step, and of what gradients are `reduced` in: "bf16", "fp16"."""
    dtypes = {
        getattr(torch, value.dtype)
        for node in graph.nodes
        if not (isinstance(node, Input) and node.role == "state")
        for value in node.makes
    }
    dtypes |= {_HALVES[each] for each in (reduced,) if each in _HALVES}
    floating = [x for x in dtypes if x.is_floating_point or x.is_complex]
    return max((torch.finfo(each).eps for each in floating), default=0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


_KINDS = {
    "output": "outputs",
    "gradient": "gradients",
    "buffer": "buffers",
    "parameter": "updated parameters",
    "state": "optimizer states",
}
DIFFERS = "a step of the plan differs from a plain eager step of the same code"
LATER = f"in a second step, {DIFFERS}"
CHANGES = "a plain eager step, run twice with the same values, gives two results, so that no plan can equal it"
_FAULT = (
    "docs/soundness.md lists the Python around a step that weft supports; if this step keeps to it, the fault is "
    "weft's: please report it with this text"
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
        """The finding of a kind that differs most, relative to the largest element; None if the kind has none."""
        own = [each for each in self.compared if each.kind == kind]
        return max(own, key=_relative, default=None)

    def __str__(self) -> str:
        lines = ["the step agrees with a plain eager step; largest differences by rounding:"]
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
    """In the order in which the step computes them; updates come last."""
    known = places(captured)
    last = (len(captured.graph.nodes), None)

    def place(each: Compared) -> tuple[bool, int]:
        updates = each.kind in ("parameter", "state")
        return updates, known.get((each.kind, each.name), last)[0]

    return sorted(compared, key=place)


def failure_text(compared: Sequence[Compared], captured: Captured, told: str) -> str:
    """The message about results of which some differ, for `DIFFERS`, `LATER` or `CHANGES`; empty if none does."""
    differing = [each for each in in_order(compared, captured) if not each.agrees]
    if not differing:
        return ""
    first, *others = differing
    where = places(captured).get((first.kind, first.name), (0, None))[1]
    apart = (
        f"differs by {first.difference:.1e}, rounding would make {first.allowed:.1e} at most, where the largest "
        f"element is {first.scale:.1e}"
    )
    text = f"{_name(first)} {first.text or apart}"
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


def _numbers(each: Compared) -> str:
    if each.scale <= each.allowed:
        return f"{each.difference:.1e}, {each.allowed:.1e} allowed"
    return f"{_relative(each):.1e} of the largest element, {each.allowed / each.scale:.1e} allowed"


def _relative(each: Compared) -> float:
    size = max(each.scale, each.allowed)
    return each.difference / size if size else 0.0
