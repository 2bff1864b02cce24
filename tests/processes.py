"""Tests of `tests/program` in their form on real processes: a plugin that `--processes` takes in.

Such a test runs in a process of its own, and where it enters `weft.local_world(n)`, n processes go on with it, each as
one rank of a job, with its own copy of all that the test has made so far. All of them must pass.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, final

import pytest
import torch.distributed as dist
from _pytest.runner import runtestprotocol

import on_ranks
import weft
from weft.program.data.samples import _end_all
from weft.runtime.world import distributed, rendezvous
from weft.runtime.world.distributed import current_world
from weft.runtime.world.launch import MEETING, TIMEOUT
from weft.runtime.world.rendezvous import private_rendezvous
from weft.runtime.world.world import World, local_world

TESTS = Path(__file__).parent
FOLDER = TESTS / "program"
# What tests take from there may enter a world.
LIBRARIES = {TESTS, TESTS.with_name("tools")}
# The parameter by which a test is told apart, and the word in its name.
FORM = "processes"
# One test in so many is drawn by a seed.
EACH = 10
# Of a test's time-out, the part after which a rank says where it hangs, and ends.
PART = 2 / 3
# Seconds that a rank waits for others.
WAIT = 60
# By which a rank knows its place.
VARIABLES = "RANK", "LOCAL_RANK", "WORLD_SIZE", MEETING, TIMEOUT
# Characters of what ranks wrote that a report shows.
SHOWN = 10_000


def pytest_report_header(config: pytest.Config) -> str:
    which = config.getoption("--processes")
    return f"processes: {'all' if which == 'all' else f'1 in {EACH}, drawn by {which}'}"


@cache
def _enters_worlds(module: ModuleType) -> bool:
    """Whether a module, or one beside it from which it takes something, enters a local world."""
    homes = {module.__name__, *(getattr(x, "__module__", None) for x in vars(module).values())}
    found = (getattr(sys.modules.get(str(home)), "__file__", None) for home in homes)
    files = {Path(path) for path in found if path} - {Path(on_ranks.__file__)}
    return any("local_world(" in path.read_text() for path in files if LIBRARIES & {*path.parents})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = metafunc.definition
    if FOLDER in test.path.parents and _enters_worlds(metafunc.module):
        forms = pytest.param(False, id=pytest.HIDDEN_PARAM), pytest.param(True, id=FORM)
        metafunc.fixturenames.append(FORM)
        metafunc.parametrize(FORM, forms)
        # All ranks have one folder: it is made before there are ranks.
        metafunc.fixturenames.sort(key=lambda name: name != "tmp_path")


def _on_processes(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and bool(callspec.params.get(FORM))


@pytest.hookimpl(trylast=True)  # a tenth of the cases that are left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which = config.getoption("--processes")
    left_out = {item for item in items if _on_processes(item) and not _taken(item, which)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _taken(item: pytest.Item, which: str) -> bool:
    """Whether a test runs on processes, where it could; those that take long only where all do."""
    if item.get_closest_marker("one_process"):
        return False
    return which == "all" or (drawn(which, item.nodeid) and not item.get_closest_marker("slow"))


def drawn(seed: str, name: str) -> bool:
    """Whether the seed draws a test, for one in `EACH` of them."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % EACH == 0


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_on_processes, session.items)):
        on_ranks.warm()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not _on_processes(item):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    config: Any = item.config
    config._tmp_path_factory.getbasetemp()
    # What fixtures of modules and sessions hold, such as threads of a world, does not come along.
    item.session._setupstate.teardown_exact(None)
    with tempfile.TemporaryDirectory(prefix="weft-") as own:
        job = _Job(Path(own), item)
        job.run()
        for report in job.reports():
            hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@final
class _Job:
    """A test that runs in processes of its own; each leaves its reports of the test in a folder, and what it wrote.

    Attributes:
        worlds: how many times the test has parted into ranks so far.
        size: how many ranks there are; 1 before it has.
        rank: this one.
    """

    def __init__(self, folder: Path, item: pytest.Item) -> None:
        self.worlds, self.size, self.rank = 0, 1, 0
        self._folder, self._item = folder, item
        self._open = False
        timeout = item.get_closest_marker("timeout")
        seconds = timeout.args[0] if timeout else item.config.getini("timeout")
        self._end = time.monotonic() + PART * float(seconds)

    def run(self) -> None:
        """Have another process run the test, and wait until all of its ranks have ended."""
        child = self._fork(0)
        if child:
            try:
                self._await([child])
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            return
        weft.local_world = self.local_world  # type: ignore[assignment,unused-ignore]
        config = self._item.config
        self._leave(
            [
                config.hook.pytest_report_to_serializable(config=config, report=report)
                for report in runtestprotocol(self._item, log=False)
            ]
        )
        os._exit(0)

    @contextmanager
    def local_world(
        self, size: int, device_type: str = "cpu", timeout: float = WAIT
    ) -> Iterator[World]:
        """In place of `weft.local_world`: go on as each of the ranks of a job."""
        if not isinstance(size, int) or size < 2 or device_type != "cpu":
            with local_world(size, device_type, timeout) as world:
                yield world
            return
        assert not self._open, "a process is in one world at a time: mark the test one_process"
        if size != self.size:
            self._part(size)
        self._open = True
        try:
            yield current_world()
        finally:
            self._open = False
        if self._item.get_closest_marker("one_process_outside"):
            self._go_on_alone()

    def _go_on_alone(self) -> None:
        """As rank 0; the others end here."""
        self._leave([])
        if self.rank:
            os._exit(0)
        _end_worlds()
        for name in VARIABLES:
            os.environ.pop(name, None)
        self.size = 1

    def _part(self, size: int) -> None:
        """Go on as so many ranks, each a copy of this process, which waits for them; of several ranks, rank 0 does."""
        if self.size > 1 or not self.worlds:
            self._go_on_alone()
        self.size, self.worlds = size, self.worlds + 1
        children = []
        for rank in range(size):
            child = self._fork(rank)
            if not child:
                meeting = str(self._folder / f"{self.worlds}.meeting")
                values = str(rank), str(rank), str(size), meeting, str(WAIT)
                os.environ.update(zip(VARIABLES, values, strict=True))
                _let_signs_go()
                private_rendezvous()
                return
            children.append(child)
        self._await(children)
        os._exit(0)

    def _fork(self, rank: int) -> int:
        """The id of the new process; 0 there."""
        faulthandler.cancel_dump_traceback_later()  # its thread would not come along
        with warnings.catch_warnings():  # threads of pytest-xdist wait, and hold nothing
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            return child
        self.rank = rank
        if not self.worlds:
            os.setsid()
            captured = self._item.config.pluginmanager.getplugin("capturemanager")
            captured.stop_global_capturing()
            captured._method = "no"
            captured.start_global_capturing()
        output = os.open(self._path("txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        faulthandler.enable(2)
        faulthandler.dump_traceback_later(self._end - time.monotonic(), exit=True, file=2)
        atexit._clear()
        atexit.register(_end_all)
        on_ranks.forget()
        return 0

    def _path(self, kind: str, rank: int | None = None) -> Path:
        return self._folder / f"{self.worlds}.{self.rank if rank is None else rank}.{kind}"

    def _leave(self, reports: list[Any]) -> None:
        """End as a process does that has made these reports, but go on."""
        self._path("json").write_text(json.dumps({"size": self.size, "reports": reports}))
        atexit._run_exitfuncs()

    def _await(self, children: list[int]) -> None:
        """Wait until these ranks have ended, and leave word of those that did not end well."""
        for rank, child in enumerate(children):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code or not self._path("json", rank).exists():
                self._path("lost", rank).write_text(
                    f"rank {rank} of {len(children)} ended with {code}"
                )

    def reports(self) -> Iterator[pytest.TestReport]:
        """Of each phase of the test one report: the first that is not as it should be, or the last."""
        config, size = self._item.config, 1
        phases: dict[str, list[pytest.TestReport]] = {"setup": [], "call": [], "teardown": []}
        for path in sorted(self._folder.glob("*.json")):
            told = json.loads(path.read_text())
            size = max(size, told["size"])
            for data in told["reports"]:
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                if isinstance(report.longrepr, list):  # why it is skipped
                    report.longrepr = tuple(report.longrepr)
                report.sections.append((f"process {path.stem}", self._written(path)))
                phases[report.when].append(report)
        for path in sorted(self._folder.glob("*.lost")):
            text = f"{path.read_text()}\n{self._written(path)}"
            phases["call"].append(
                pytest.TestReport(
                    self._item.nodeid, self._item.location, {}, "failed", text, "call"
                )
            )
        for reports in phases.values():
            failed = [report for report in reports if report.failed]
            for report in (failed or reports)[-1:]:
                report.sections += [("another process", each.longreprtext) for each in failed[:-1]]
                report.user_properties.append((FORM, size))
                yield report

    def _written(self, path: Path) -> str:
        return path.with_suffix(".txt").read_text(errors="replace")[-SHOWN:]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many tests ran on ranks, and, of all, which did not: they need no form on processes."""
    sizes = {
        report.nodeid: dict(report.user_properties)[FORM]
        for reports in terminalreporter.stats.values()
        for report in reports
        if FORM in dict(getattr(report, "user_properties", ())) and report.when == "call"
    }
    alone = sorted(name for name, size in sizes.items() if size == 1)
    terminalreporter.write_line(
        f"on processes: {len(sizes) - len(alone)} tests; {len(alone)} entered no world of several ranks"
    )
    if config.get_verbosity() > 0:
        terminalreporter.write_line("\n".join(alone))


def _end_worlds() -> None:
    """End the worlds of this process, and its process groups."""
    while distributed._lasting_worlds:
        distributed._lasting_worlds.popitem()[1].close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _let_signs_go() -> None:
    """Let go the locks of the process that this one was forked from."""
    while rendezvous._held:
        rendezvous._held.pop().close()
