"""The counts of eager runs: in one line, as JSON, and as a section of docs/ops.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.opinfo.eager import FORMS, VERDICTS, EagerEffort, EagerReport
from tools.scores.stamp import Stamp

TITLE = "## Eager global tensors\n"
COMMAND = "python -m tools.opinfo --eager"
HEAD = """{stamp}

{ops} ops run at once on global tensors, through the same runtime as users' programs: up to {samples} samples in each
dtype, as functions and as methods that write in place, with the gradients of every input, on 2 ranks or 2 × 2, every
input and every incoming gradient laid out at random: split along any dimension, uneven and empty shards included,
whole, or as a sum. Results, numbers for Python and gradients are compared with plain torch; of random ops shapes and
dtypes. Among {runs} runs {refused} % are refused. Values that torch reads on the host (`tensor_split`) are plain.

| verdict | means |
|---|---|
| right | all results and gradients equal plain torch |
| refused | an error of weft says what would do |
| wrong | a value, a gradient, a shape or a dtype differs |
| crash | any other error |
"""


def totals(reports: Sequence[EagerReport]) -> Counter[tuple[str, str, str]]:
    """Runs by dtype, form and verdict."""
    found: Counter[tuple[str, str, str]] = Counter()
    for report in reports:
        found.update(report.counts)
    return found


def _of(
    counts: Counter[tuple[str, str, str]], verdict: str, dtype: str = "", form: str = ""
) -> int:
    return sum(
        count
        for (own, shape, found), count in counts.items()
        if found == verdict and dtype in ("", own) and form in ("", shape)
    )


def summary(reports: Sequence[EagerReport]) -> str:
    """The totals in one line."""
    counts = totals(reports)
    parts = [f"{_of(counts, verdict)} {verdict}" for verdict in VERDICTS]
    return f"{sum(counts.values())} runs of {len(reports)} ops: " + ", ".join(parts)


def as_json(reports: Sequence[EagerReport]) -> dict[str, Any]:
    """All counts and reasons, by op."""
    return {
        report.name: {
            "counts": {" / ".join(key): count for key, count in sorted(report.counts.items())},
            "reasons": [[*key, count] for key, count in report.reasons.most_common()],
            "seconds": round(report.seconds, 2),
        }
        for report in reports
    }


def write_table(
    path: Path, reports: Sequence[EagerReport], effort: EagerEffort, stamp: Stamp
) -> None:
    """Replace the section of the page, which is its last."""
    text = path.read_text() if path.exists() else ""
    path.write_text(text.partition(TITLE)[0].rstrip() + "\n\n" + section(reports, effort, stamp))


def section(reports: Sequence[EagerReport], effort: EagerEffort, stamp: Stamp) -> str:
    """The section's text."""
    counts = totals(reports)
    every = sum(counts.values())
    refused = _of(counts, "refused") / max(every, 1)
    lines = [
        TITLE,
        HEAD.format(
            stamp=stamp,
            samples=effort.samples,
            ops=len(reports),
            runs=every,
            refused=f"{100 * refused:.1f}",
        ),
        "| dtype | form | " + " | ".join(VERDICTS) + " |",
        "|---|---|" + "---|" * len(VERDICTS),
    ]
    for dtype in effort.dtypes:
        name = str(dtype).removeprefix("torch.")
        for form in FORMS:
            row = " | ".join(str(_of(counts, verdict, name, form)) for verdict in VERDICTS)
            lines.append(f"| {name} | {form} | {row} |")
    row = " | ".join(str(_of(counts, verdict)) for verdict in VERDICTS)
    lines.append(f"| all | | {row} |")
    lines += ["", "| op | not right | why |", "|---|---|---|"]
    rest = [report for report in reports if report.verdict != "right"]
    lines += map(_line, sorted(rest, key=lambda r: (-VERDICTS.index(r.verdict), r.name)))
    return "\n".join(lines) + "\n"


def _line(report: EagerReport) -> str:
    missed = sum(count for (_, _, verdict), count in report.counts.items() if verdict != "right")
    why = "; ".join([*report.wrong[:1], *report.refused][:2]).replace("|", "\\|")
    return f"| `{report.name}` | {missed} of {sum(report.counts.values())} | {why} |"
