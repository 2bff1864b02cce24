"""The text of values, layouts and arguments in graphs and plans.

Placements are declared once, at the top, as `placement @0 = cpu [[0, 1], [2, 3]]`; a layout is then
`@0(S(0), B)`. Arguments are written as Python would, values as `%name`, constants of torch as
`!dtype:float32`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from weft.ir.nodes import FORWARD, PerMicroBatch, Phase, Ref, UpdateBytes
from weft.layout import Layout, Placement
from weft.ops.call import Token


def quoted(text: str) -> str:
    """A string in double quotes, with JSON's escapes."""
    return json.dumps(text)


def argument_text(arg: Any) -> str:
    """One argument tree, such as `(%x, [2, 3], !dtype:float32, 1e-05)`; tuples are written as lists."""
    match arg:
        case Ref(name=name):
            return f"%{name}"
        case Token(kind=kind, name=name):
            return f"!{kind}:{name}"
        case PerMicroBatch(values=values):
            return f"vary({', '.join(map(argument_text, values))})"
        case str():
            return quoted(arg)
        case tuple():
            return f"[{', '.join(map(argument_text, arg))}]"
        case float() if not math.isfinite(arg):
            return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(arg, "NaN")
        case _:
            return repr(arg)


def call_text(op: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]) -> str:
    """An op with its arguments: `aten.sum.dim_IntList(%x, [0], dtype=!dtype:float32)`."""
    shown = [argument_text(arg) for arg in args]
    shown += [f"{key}={argument_text(arg)}" for key, arg in kwargs]
    return f"{op}({', '.join(shown)})"


def phase_text(phase: Phase) -> str:
    """` {1 backward}`; nothing for the forward of stage 0."""
    return "" if phase == FORWARD else f" {phase}"


def taken_text(takes: UpdateBytes) -> str:
    """` takes [8, 4, 0]`: alone, left and together; nothing for updates that take no memory."""
    sizes = [takes.alone, takes.left, takes.together]
    return f" takes {sizes}" if any(sizes) else ""


def micro_text(micro_batches: int) -> str:
    """` micro 4` in the header of a graph or a rank's plan; nothing for one micro-batch."""
    return "" if micro_batches == 1 else f" micro {micro_batches}"


def tensor_text(shape: Sequence[int], dtype: str) -> str:
    """Shape and dtype: `float32[8, 16]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def layout_text(layout: Layout | None, placements: Sequence[Placement]) -> str:
    """` @0(S(0), B)`, or nothing for a value that has no layout yet."""
    if layout is None:
        return ""
    sbp = ", ".join(map(str, layout.sbp))
    return f" @{placements.index(layout.placement)}({sbp})"


def placement_lines(placements: Sequence[Placement]) -> list[str]:
    """The declarations at the top of a text."""
    return [f"placement @{index} = {placement}" for index, placement in enumerate(placements)]
