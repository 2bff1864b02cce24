"""The results as lines, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tools.real_sizes.judge import Check
from tools.real_sizes.run import Result

QUANTITIES = ("bytes", "work", "parameters", "states", "peak", "exchanges")


def line_of(result: Result) -> str:
    """One row with what fails in it, for a terminal."""
    head = f"{'FAIL' if result.fails else 'ok':4} {result.row.name} ({result.seconds:.1f} s)"
    if result.error:
        return f"{head}\n     {result.error}"
    ratios = " ".join(
        f"{check.quantity} {check.ratio:.2f}{_mark(check)}" for check in result.checks
    )
    lines = [f"{head}\n     {ratios}"]
    if any(check.verdict == "FAIL" and check.quantity == "bytes" for check in result.checks):
        assert result.planned is not None
        assert result.book is not None
        lines.append(f"     planned  {_sizes(result.planned.sent)}")
        lines.append(f"     textbook {_sizes(result.book.sent)}")
        lines += [f"     {size / 1e9:8.3f} GB {cause}" for cause, size in result.planned.causes]
    return "\n".join(lines)


def _mark(check: Check) -> str:
    return {"ok": "", "better": "<", "explained": "*", "FAIL": "!"}[check.verdict]


def _sizes(sent: object) -> str:
    assert isinstance(sent, dict)
    return ", ".join(f"{kind} {size / 1e9:.3f} GB" for kind, size in sent.items())


def json_of(results: Sequence[Result]) -> str:
    """Every figure."""
    return json.dumps(
        [{"name": each.row.name, "fails": each.fails, **asdict(each)} for each in results], indent=1
    )


def page_of(results: Sequence[Result]) -> str:
    """A page."""
    return "\n".join(map(line_of, results))
