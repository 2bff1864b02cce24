"""The distinct parts of a rank's segments and how each of them runs, for `explain`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from weft.program.tables import table, text_of
from weft.runtime.kernel_choice import Choice
from weft.runtime.parts import Distinct


def kernel_text(parts: Iterable[Distinct]) -> str:
    """The table as text; nothing where all work is ATen code."""
    every = tuple(parts)
    return text_of("", kernel_table(every)) if every else ""


def kernel_table(parts: Iterable[Distinct]) -> Table:
    """One row for each distinct part: its calls, how often it stands in the plan, its seconds as measured."""
    rows = [
        (
            str(one.calls),
            str(one.times),
            _ran(one.choice),
            _ms(one.choice.aten),
            _ms(one.choice.inductor),
        )
        for one in parts
    ]
    columns = ("calls", "times", "runs as", "ATen ms", "Inductor ms")
    return table("kernels", columns, rows)


def _ran(choice: Choice) -> str:
    if choice.compiled is not None:
        return "Inductor"
    return f"ATen ({choice.problem})" if choice.problem else "ATen"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"
