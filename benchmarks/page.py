"""Writes the results into docs/benchmarks.md: `python -m benchmarks.page [results.json]`.

What stands between the two marks there is replaced; the rest of the page is written by hand. The results themselves,
with the seconds of every round and what the single topics wrote beside them, go to `docs/results/benchmarks.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import topics
from benchmarks.measure import OUT
from benchmarks.report import COLUMNS, VERDICTS, cells, judged
from benchmarks.targets import verdicts

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
RAW = PAGE.parent / "results" / "benchmarks.json"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


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
    single = topics.lines(result.get("topics", {}))
    tables = [markdown(VERDICTS, targets), markdown(COLUMNS, rows)]
    tables += [markdown(topics.COLUMNS, single)] if single else []
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
    result["topics"] = topics.read(source.parent, result["failed_topics"])
    PAGE.write_text(page(PAGE.read_text(), result))
    RAW.write_text(raw(result))


if __name__ == "__main__":
    main()
