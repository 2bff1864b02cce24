"""The counts of eager runs: in one line, as JSON, and as a section of docs/ops.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.opinfo.eager import FORMS, VERDICTS, EagerEffort, EagerReport

TITLE = "## Eager global tensors\n"


def totals(reports: Sequence[EagerReport]) -> Counter[tuple[str, str, str]]:
    """Runs by dtype, form and verdict."""
    found: Counter[tuple[str, str, str]] = Counter()
    for report in reports:
        found.update(report.counts)
    return found


def _of(counts: Counter[tuple[str, str, str]], verdict: str, dtype: str = "", form: str = "") -> int:
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


def write_table(path: Path, reports: Sequence[EagerReport], effort: EagerEffort) -> None:
    """Replace the section of the page, which is its last."""
    text = path.read_text() if path.exists() else ""
    path.write_text(text.partition(TITLE)[0].rstrip() + "\n\n" + section(reports, effort))


def section(reports: Sequence[EagerReport], effort: EagerEffort) -> str:
    """The section's text."""
    raise NotImplementedError
