"""The command: `python -m tools.opinfo [--eager]` writes docs/ops.md; it fails when anything is wrong."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from tools.opinfo import eager, eager_report
from tools.opinfo.check import Effort, OpReport, check_op, shortened
from tools.opinfo.report import COMMAND, SOURCES, summary, write_page
from tools.opinfo.samples import full_name, opinfos
from tools.scores.stamp import stamp_now
from tools.workers import Lost, Worker

Report = TypeVar("Report", OpReport, eager.EagerReport)

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"
LIMIT = 120.0  # seconds that one op may take


def main() -> int:
    """Check the ops that the command line names, all without names; only a whole run writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.opinfo", description=__doc__)
    parser.add_argument("--op", nargs="+", default=[], help="names of OpInfos; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--samples", type=int, help="samples of an op")
    parser.add_argument("--layouts", type=int, help="layouts of a sample")
    parser.add_argument("--page", type=Path, help=f"where the page goes; {PAGE.name} for all ops")
    parser.add_argument("--eager", action="store_true", help="eager global tensors, many dtypes")
    parser.add_argument("--dtype", nargs="+", default=[], help="with --eager: all by default")
    parser.add_argument("--json", type=Path, help="with --eager: where all counts go")
    options = parser.parse_args()
    began = time.perf_counter()
    failed = _eager(options) if options.eager else _compiled(options)
    print(f"{time.perf_counter() - began:.0f} s")
    return int(failed)


def check_all(
    infos: Sequence[Any],
    check: Callable[[Any], Report],
    lost: Callable[[str, str], Report],
    jobs: int,
) -> Iterator[Report]:
    """The reports of all ops, in the order in which they are done, each in a process that may end.

    Args:
        infos: OpInfos.
        check: makes the report of one.
        lost: makes that of an op that ended its process, of its name and what happened.
        jobs: how many processes.
    """

    def checked(number: int) -> Report:
        began = time.perf_counter()
        report = check(infos[number])
        report.seconds = time.perf_counter() - began
        return report

    waiting = list(range(len(infos)))[::-1]
    workers: list[Worker[int, Report]] = []
    for _ in range(min(jobs, len(infos))):
        workers.append(Worker(checked, LIMIT))
        workers[-1].ask(waiting.pop())
    while busy := [worker for worker in workers if worker.asked is not None]:
        ready = wait([worker.connection for worker in busy], timeout=1.0)
        for worker in busy:
            number = worker.asked
            if number is None or not (worker.connection in ready or worker.late):
                continue
            found = worker.answer()
            yield lost(full_name(infos[number]), found.why) if isinstance(found, Lost) else found
            if waiting:
                worker.ask(waiting.pop())
            else:
                worker.stop()


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _compiled(options: argparse.Namespace) -> bool:
    infos = [info for info in opinfos() if not options.op or full_name(info) in options.op]
    effort = Effort(**_given(samples=options.samples, layouts=options.layouts))
    stamp, reports = stamp_now(COMMAND, SOURCES), []
    for report in check_all(
        infos,
        partial(check_op, effort=effort),
        lambda name, why: OpReport(name, wrong=[why]),
        options.jobs,
    ):
        reports.append(report)
        _show(report, bool(options.op))
    print(summary(reports))
    _show_reasons(reports)
    path = options.page or (None if options.op else PAGE)
    if path:
        write_page(path, reports, effort, stamp)
    return any(report.wrong for report in reports)


def _eager(options: argparse.Namespace) -> bool:
    dtypes = tuple(d for d in eager.DTYPES if not options.dtype or str(d)[6:] in options.dtype)
    infos = [info for info in opinfos(dtypes) if not options.op or full_name(info) in options.op]
    effort = eager.EagerEffort(
        **_given(samples=options.samples, layouts=options.layouts), dtypes=dtypes
    )
    stamp, reports = stamp_now(eager_report.COMMAND, SOURCES), []
    for report in check_all(
        infos, partial(eager.check_eager, effort=effort), eager.lost, options.jobs
    ):
        reports.append(report)
        _show(report, bool(options.op))
    print(eager_report.summary(reports))
    _show_reasons(reports)
    if options.json:
        options.json.write_text(json.dumps(eager_report.as_json(reports), indent=1) + "\n")
    path = options.page or (None if options.op or options.dtype else PAGE)
    if path:
        eager_report.write_table(path, reports, effort, stamp)
    return any(report.wrong for report in reports)


def _show(report: OpReport | eager.EagerReport, every: bool) -> None:
    if every or report.verdict not in ("right", "shape"):
        why = [*report.wrong[:3], *report.refused]
        print(
            f"{report.verdict} {report.name} ({report.seconds:.1f} s): {shortened('; '.join(why), 400)}"
        )
        sys.stdout.flush()


def _show_reasons(reports: Any) -> None:
    reasons = Counter(shortened(reason, 90) for report in reports for reason in report.refused)
    for reason, count in reasons.most_common(15):
        print(f"  {count} ops: {reason}")


if __name__ == "__main__":
    sys.exit(main())
