"""The command: `python -m tools.opinfo` writes docs/ops.md; it fails when anything is wrong."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tools.opinfo.check import Effort, OpReport
from tools.opinfo.report import summary, write_page
from tools.opinfo.samples import full_name, opinfos
from tools.opinfo.workers import check_all

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def main() -> int:
    """Check the ops that the command line names, all without names; only a whole run writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.opinfo", description=__doc__)
    parser.add_argument("--op", nargs="+", default=[], help="names of OpInfos; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--samples", type=int, default=Effort.samples, help="samples of an op")
    parser.add_argument("--layouts", type=int, default=Effort.layouts, help="layouts of a sample")
    parser.add_argument("--page", type=Path, help=f"where the page goes; {PAGE.name} for all ops")
    options = parser.parse_args()
    infos = [info for info in opinfos() if not options.op or full_name(info) in options.op]
    began, reports = time.perf_counter(), []
    effort = Effort(options.samples, options.layouts)
    for report in check_all(infos, effort, options.jobs):
        reports.append(report)
        _show(report, bool(options.op))
    print(f"{summary(reports)}; {time.perf_counter() - began:.0f} s")
    _show_reasons(reports)
    path = options.page or (None if options.op else PAGE)
    if path:
        write_page(path, reports, options.samples, options.layouts)
    return int(any(report.wrong for report in reports))


def _show(report: OpReport, every: bool) -> None:
    if every or report.verdict != "right":
        why = [*report.wrong[:3], *report.refused]
        print(f"{report.verdict} {report.name} ({report.seconds:.1f} s): {'; '.join(why)[:400]}")
        sys.stdout.flush()


def _show_reasons(reports: list[OpReport]) -> None:
    reasons = Counter(reason[:90] for report in reports for reason in report.refused)
    for reason, count in reasons.most_common(15):
        print(f"  {count} ops: {reason}")


if __name__ == "__main__":
    sys.exit(main())
