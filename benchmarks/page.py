"""Results as text: tables on the terminal, and in docs/benchmarks.md, `python -m benchmarks.page [results.json]`.

There the text between the two marks is replaced; the rest of the page is written by hand. The results themselves, with
the seconds of every round, go to `docs/results/benchmarks.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import OUT
from benchmarks.pairs import RANKS
from benchmarks.targets import Row, Verdict, verdicts

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
RAW = PAGE.parent / "results" / "benchmarks.json"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
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
    console.print(f"{result['minutes']:.1f} minutes")


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    made = Table(*columns, title=title)
    for line in lines:
        made.add_row(*line)
    return made


def page(text: str, result: Mapping[str, Any]) -> str:
    """The page's text with these results.

    Raises:
        ValueError: when the page has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} must hold {BEGIN} and, behind it, {END}")
    return f"{before}{BEGIN}\n\n{section(result)}\n\n{END}{after}"


def section(result: Mapping[str, Any]) -> str:
    found = result["machine"]
    head = (
        f"`{result['command']}`, {result['minutes']:.0f} minutes on {found['cores']} cores of "
        f"{found['processor']}; torch {found['torch']}, Python {found['python']}, one thread for each process; "
        f"allocator {result['malloc']}; {disturbances(result)}. Raw: [results](results/benchmarks.json)."
    )
    targets = [judged(each) for each in verdicts(result["rows"])]
    rows = [cells(row) for row in result["rows"]]
    made = [result["made"], head] if "made" in result else [head]
    tables = [markdown(VERDICTS, targets), markdown(COLUMNS, rows)]
    return "\n\n".join([*made, *tables])


def disturbances(result: Mapping[str, Any]) -> str:
    """How often others used the machine, in words."""
    loads = [load for pair in result["loads"].values() for load in pair]
    disturbed = sum(load["disturbed"] for load in loads)
    return f"{disturbed} of {len(loads)} rounds were disturbed by other processes or the host"


def raw(result: Mapping[str, Any]) -> str:
    """The results as a file that is small and whose changes can be read: a row a line."""
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    others = [
        f"{json.dumps(name)}: {json.dumps(x)}" for name, x in result.items() if name != "rows"
    ]
    return "{\n" + ",\n".join([*others, f'"rows": [\n{rows}\n]']) + "\n}\n"


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [columns, ["---"] * len(columns), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every
    )


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT / "results.json"
    result = json.loads(source.read_text())
    PAGE.write_text(page(PAGE.read_text(), result))
    RAW.write_text(raw(result))


if __name__ == "__main__":
    main()
