"""The results as lines and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from tools.real_sizes import textbook
from tools.real_sizes.judge import TOLERANCE, Check, Verdict
from tools.real_sizes.rows import FAMILIES, all_rows
from tools.real_sizes.run import Result
from tools.scores.stamp import Stamp

QUANTITIES = ("bytes", "work", "parameters", "states", "peak", "exchanges")
MARKS: Mapping[Verdict, str] = {"ok": "", "better": " <", "explained": " *", "FAIL": " !"}
COMMAND = "python -m tools.real_sizes --page docs/real_sizes.md"
SOURCES = ("src/weft", "tools/real_sizes")
FIRST = "The bytes, work and memory of plans for published models, compared with closed formulas."
HEAD = f"""Each row plans a training step with AdamW on the meta device, without running it, and compares what one rank
sends, computes and holds with closed formulas (`tools/real_sizes/textbook.py`). Widths, heads and vocabularies are the
published ones; where fewer layers are planned than published, the formulas have as many.

- A cell is the ratio of the plan to the textbook; within {TOLERANCE:.0%} it counts as equal. `<` is better, `*` is
  explained below the tables, `!` fails. Peak and exchanges are upper bounds.
- A cell says how a plan stands to the textbook. How a plan of today stands to this page is another question: a gate,
  `python -m tools.scores`, plans a few rows again; memory may be a tenth other than here, as plans came to count more
  of it, and all else is to be the same.
- *bytes*: what a rank sends in a step; *work*: operations of matrix products; *parameters*, *states*: what lies on it
  between steps; *peak*: the most it holds, against data parallel's with the storage changed; *exchanges*: acts of
  communicators.
- For a pipeline, bytes and work are those of one rank of each stage together, and the peak is the highest.
- fp32: everything in float32; bf16: parameters in float32, work under autocast; pure bf16: everything in bfloat16.

## Textbook

{(textbook.__doc__ or "").partition(chr(10) * 2)[2].strip()}
"""


def line_of(result: Result) -> str:
    """One row with what fails in it, for a terminal."""
    head = f"{'FAIL' if result.fails else 'ok':4} {result.row.name} ({result.seconds:.1f} s)"
    if result.error:
        return f"{head}\n     {_first(result.error)}"
    ratios = " ".join(
        f"{check.quantity} {check.ratio:.2f}{MARKS[check.verdict]}" for check in result.checks
    )
    lines = [f"{head}\n     {ratios}"]
    if result.planned and result.book and _fails(result, "bytes", "exchanges"):
        lines.append(f"     planned  {_sizes(result.planned.sent)}")
        lines.append(f"     textbook {_sizes(result.book.sent)}")
        lines += [f"     {size / 1e9:8.3f} GB {cause}" for cause, size in result.planned.causes]
    if result.planned and _fails(result, "peak"):
        lines.append(f"     held at the peak: {_sizes(result.planned.memory)}")
    return "\n".join(lines)


def _fails(result: Result, *quantities: str) -> bool:
    return any(check.verdict == "FAIL" and check.quantity in quantities for check in result.checks)


def _sizes(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {size / 1e9:.3f} GB" for kind, size in sizes.items() if size)


def _first(error: str) -> str:
    """The beginning of a message."""
    return " ".join(error.split())[:240]


def page_of(results: Sequence[Result], stamp: Stamp) -> str:
    """All results: a table for each family, the explanations that were needed, and what fails."""
    failed = [result for result in results if result.fails]
    lines = ["# Plans at real sizes", "", FIRST, "", str(stamp), "", HEAD, "## Results", ""]
    good = len(results) - len(failed)
    lines.append(
        f"{len(results)} of {len(all_rows())} rows are planned here; {good} plans are as the textbook says, "
        "better or explained."
    )
    for family, group in groupby(results, lambda result: result.row.family):
        lines += [
            "",
            f"### {family}",
            "",
            f"Sizes: {FAMILIES[family].source}.",
            "",
            *_table(list(group)),
        ]
    lines += ["", "## Explanations", "", *_explanations(results)]
    if failed:
        lines += [
            "",
            "## Failures",
            "",
            *(f"- {result.row.name}: {_reason(result)}" for result in failed),
        ]
    return "\n".join([*lines, ""])


def _table(results: Sequence[Result]) -> Iterator[str]:
    head = ("layers", "batch", "precision", "strategy", "ranks", "GB sent", "peak GB", *QUANTITIES)
    yield _line(head)
    yield _line(["---"] * len(head))
    yield from map(row_of, results)


def row_of(result: Result) -> str:
    """The line of a row."""
    return _line(_cells(result))


def _cells(result: Result) -> list[str]:
    row, shape = result.row, result.row.shape
    size = [f"{shape.layers}", f"{shape.sequences} × {shape.tokens}", shape.precision]
    where = [row.kind, "×".join(map(str, row.grid))]
    if result.planned is None:
        return [
            *size,
            *where,
            "",
            "",
            f"**{result.error.partition(':')[0]}**",
            *[""] * (len(QUANTITIES) - 1),
        ]
    totals = [f"{result.planned.bytes / 1e9:.3g}", f"{result.planned.peak / 1e9:.3g}"]
    ratios = {check.quantity: _ratio(check) for check in result.checks}
    return [*size, *where, *totals, *(ratios.get(quantity, "") for quantity in QUANTITIES)]


def _ratio(check: Check) -> str:
    text = f"{check.ratio:.2f}{MARKS[check.verdict]}"
    return f"**{text}**" if check.verdict == "FAIL" else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _explanations(results: Sequence[Result]) -> list[str]:
    """Each sentence once, with the strategies and quantities that need it."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for check in result.checks:
            if check.why and check.verdict != "ok":
                found.setdefault(check.why, {})[f"{check.quantity} of {result.row.kind}"] = None
    return [f"- {', '.join(where)}: {why}." for why, where in found.items()]


def _reason(result: Result) -> str:
    if result.error:
        return _first(result.error)
    failing = (check for check in result.checks if check.verdict == "FAIL")
    return ", ".join(f"{check.quantity} {check.ratio:.2f}" for check in failing)
