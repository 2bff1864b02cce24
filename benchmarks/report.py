"""Results as text: the same cells for the table on the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pairs import RANKS
from benchmarks.targets import Row, Verdict, verdicts

COLUMNS = (
    "work",
    "strategy",
    "system",
    "ms a step (quartiles)",
    "rounds",
    "over the limit [95 %]",
    "against the best peer [95 %]",
    "compile s (again)",
    "peak MiB",
    "resident MiB",
    "losses within",
)
VERDICTS = ("target", "of", "bound", "found", "")


def cells(row: Row) -> list[str]:
    """Of one row, in the order of `COLUMNS`."""
    link, ranks = row["link"], row.get("ranks", RANKS)
    unusual = [*([link] if link != "host" else []), *([f"{ranks} ranks"] if ranks > RANKS else [])]
    head = [row["work"], ", ".join([row["strategy"], *unusual]), row["system"]]
    if "error" in row:
        error = " ".join(row["error"].split())
        return [*head, f"failed: {error[:90]}", *[""] * (len(COLUMNS) - 4)]
    scale = 2 if row["seconds"] < 0.01 else 1 if row["seconds"] < 0.1 else 0
    low, high = (f"{each * 1e3:.{scale}f}" for each in row["spread"])
    again = row["warm_compile_seconds"]
    agree = row["losses_agree"]
    return [
        *head,
        f"{row['seconds'] * 1e3:.{scale}f} ({low}–{high})",
        f"{row['rounds']}" + (f", {row['disturbed']} disturbed" if row["disturbed"] else ""),
        over_limit(row),
        against(row),
        f"{row['compile_seconds']:.1f}" + (f" ({again:.1f})" if again is not None else ""),
        f"{row['peak_bytes'] / 2**20:.{0 if row['peak_bytes'] > 2**23 else 2}f}",
        f"{row['resident_bytes'] / 2**20:.0f}" if row.get("resident_bytes") else "",
        "" if agree is None else f"{agree:.0e}",
    ]


def against(row: Row) -> str:
    if not row["ratio_to_best_peer"]:
        return ""
    return f"{row['ratio_to_best_peer']:.2f}× {row['best_peer']}{ends(row['ratio_interval'])}"


def over_limit(row: Row) -> str:
    if not row["ratio_to_limit"]:
        return ""
    return f"{row['ratio_to_limit']:.2f}× {row['limit']}{ends(row['limit_interval'])}"


def ends(interval: Sequence[float] | None, decimals: int = 2) -> str:
    """Of an interval; a question mark where there are too few rounds for one."""
    return f" [{interval[0]:.{decimals}f}–{interval[1]:.{decimals}f}]" if interval else " [?]"


def judged(each: Verdict) -> list[str]:
    """The cells of a target; its interval with a decimal more than its bound, to show on which side it lies."""
    found = "–" if each.found is None else f"{each.found:.2f}"
    found += ends(each.interval, 3) if each.interval else ""
    said = {True: "", False: "missed", None: "undecided"}[each.held]
    return [each.place, each.what, each.bound, found, said]


def show(result: Mapping[str, Any]) -> None:
    """Print rows and targets."""
    console = Console(width=None if Console().is_terminal else 180)
    console.print(table("Results", COLUMNS, [cells(row) for row in result["rows"]]))
    found = [judged(each) for each in verdicts(result["rows"])]
    console.print(table("Targets", VERDICTS, found))
    for topic, error in result["failed_topics"].items():
        console.print(f"{topic}: {error}")
    console.print(f"{result['minutes']:.1f} minutes")


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    made = Table(*columns, title=title)
    for line in lines:
        made.add_row(*line)
    return made
