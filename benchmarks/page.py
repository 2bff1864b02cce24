"""Writes the results into docs/benchmarks.md: `python -m benchmarks.page [results.json]`.

What stands between the two marks there is replaced; the rest of the page is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import OUT
from benchmarks.report import COLUMNS, VERDICTS, cells, judged
from benchmarks.targets import verdicts

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
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
        f"{found['processor']}; torch {found['torch']}, Python {found['python']}, one thread for each process."
    )
    targets = [judged(each) for each in verdicts(result["rows"])]
    rows = [cells(row) for row in result["rows"]]
    made = [result["made"], head] if "made" in result else [head]
    return "\n\n".join([*made, markdown(VERDICTS, targets), markdown(COLUMNS, rows)])


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [columns, ["---"] * len(columns), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every
    )


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT / "results.json"
    PAGE.write_text(page(PAGE.read_text(), json.loads(source.read_text())))


if __name__ == "__main__":
    main()
