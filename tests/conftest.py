"""What all tests share: one thread for torch's ops, and golden files."""

from __future__ import annotations

import difflib
import gc
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import pytest

# Two cores run several ranks in many tests; more threads only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Actors check themselves after every event, here and in processes that tests start.
os.environ.setdefault("WEFT_DEBUG", "1")

# Plans do not depend on whether somebody has measured this machine.
os.environ.setdefault("WEFT_PLAN_COSTS", "usual")

UPDATE = "--update-golden"
THOROUGH = "--thorough"
# By this the numbers of `sampled.txt` are multiplied: of the cases of each of its tests the first and some others run.
SPARSE = 2
PROCESSES = "--processes"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(UPDATE, action="store_true", help="write the golden files anew")
    parser.addoption(THOROUGH, action="store_true", help="all cases of every test")
    told = "also tests/program on real processes: all, or a tenth, drawn by this word"
    parser.addoption(PROCESSES, help=told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(UPDATE):
        items[:] = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
    if not config.getoption(THOROUGH):
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those marked `thorough`, and of the cases of each test of a module in `sampled.txt` all but every n-th,
    times `SPARSE`.
    """
    found, numbers, sampled = set[pytest.Item](), Counter[tuple[object, ...]](), _sampled()
    for item in items:
        if item.get_closest_marker("thorough"):
            found.add(item)
        elif item.path in sampled:
            cases: Any = getattr(item, "callspec", None)
            form = cases and cases.params.get("processes")
            test = (item.path, getattr(item, "originalname", item.name), form)
            if numbers[test] % (SPARSE * sampled[item.path]):
                found.add(item)
            numbers[test] += 1
    return found


def _sampled() -> dict[Path, int]:
    """The modules of `sampled.txt`, with n."""
    folder = Path(__file__).parent
    rows = (line.split() for line in (folder / "sampled.txt").read_text().splitlines())
    return {folder / module: int(n) for n, module in rows}


@final
class Frozen:
    """What the test modules and their libraries have made stays: collections need not go over it in every test.

    Nor are captures to look there for what they have left, which takes a second by the end; tests that want it take the
    fixture `thawed`.
    """

    def __init__(self) -> None:
        self.may_thaw = False
        self._thaw, self._thawed = gc.unfreeze, True
        self._tests = 0

    def unfreeze(self) -> None:
        """In place of `gc.unfreeze`."""
        if self.may_thaw:
            self._thaw()
            self._thawed = True

    def after_test(self) -> None:
        """Freeze what was thawed, and now and then what tests have left; young garbage goes before."""
        self._tests += 1
        if self._thawed or not self._tests % EACH:
            gc.collect(1 if self._thawed else 2)
            gc.freeze()
            self._thawed = False


# After how many tests the rest is frozen.
EACH = 200
frozen = Frozen()


def pytest_configure(config: pytest.Config) -> None:
    gc.unfreeze = frozen.unfreeze
    if config.getoption(PROCESSES):
        config.pluginmanager.import_plugin("processes")


def pytest_collection_finish() -> None:
    frozen.after_test()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    frozen.after_test()


@pytest.fixture
def thawed() -> Iterator[None]:
    """Captures look for what they have left in all that is alive, modules of tests included."""
    frozen.may_thaw = True
    yield
    frozen.may_thaw = False


@pytest.fixture
def double_precision() -> Iterator[None]:
    """New tensors are float64, so that results can be compared to 1e-10."""
    torch = importlib.import_module("torch")  # most tests of plans do without
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of ops that a test declares are gone afterwards, for the tests that come next."""
    holder = importlib.import_module("weft.ops.rule")
    for name in ("_RULES", "_SHARING"):
        monkeypatch.setattr(holder, name, vars(holder)[name].copy())


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(text, name)` compares `text` with the file `golden/<name>.txt` beside the test module."""
    folder = Path(request.path).parent / "golden"
    update = bool(request.config.getoption(UPDATE))

    def check(text: str, name: str) -> None:
        path = folder / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if update:
            folder.mkdir(exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.exists() else ""
        if text != expected:
            pytest.fail(_difference(path, expected, text), pytrace=False)

    return check


def _difference(path: Path, expected: str, found: str) -> str:
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), f"golden/{path.name}", "found", lineterm=""
    )
    head = f"{path} is out of date; if the new text is right, run: make golden"
    return "\n".join((head, *lines))
