"""The package weft looks its names up when they are read; importing it, or what plans, imports no torch."""

from __future__ import annotations

import ast
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import weft
import weft.tensor.create
from weft.lazy import interrupts_later, keep_names, looked_up


def in_fresh(script: str) -> str:
    """What a script prints in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_types_and_names_agree() -> None:
    """What type checkers see is what there is."""
    tree = ast.parse(Path(str(weft.__file__)).read_text())
    (seen,) = (
        node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    )
    names = {
        alias.asname or alias.name
        for node in seen.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert names | {"__version__", "errors"} == set(weft.__all__)
    assert all(hasattr(weft, name) for name in weft.__all__)
    assert set(weft.__all__) <= set(dir(weft))


def test_a_function_is_not_its_package() -> None:
    assert isinstance(sys.modules["weft.tensor"], ModuleType)
    assert callable(weft.tensor)
    assert not isinstance(weft.tensor, ModuleType)


def test_looking_up_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has seeded gives the same numbers whatever libraries do when they are imported."""
    (tmp_path / "drawing.py").write_text("import random\nnumber = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    assert 0 <= looked_up("weft", {"number": "drawing"})("number") < 1
    assert random.getstate() == before
    del vars(weft)["number"], sys.modules["drawing"]


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match="'weft' has no attribute 'shard'"):
        _ = weft.shard  # type: ignore[attr-defined]


def test_names_are_looked_up_once_and_kept() -> None:
    package = ModuleType("of_a_test")
    sys.modules["of_a_test"] = package
    try:
        homes = {"loads": "json"}
        keep_names("of_a_test", homes)
        found = looked_up("of_a_test", homes)("loads")
        assert vars(package)["loads"] is found
        setattr(package, "loads", sys)  # noqa: B010
        setattr(package, "other", sys)  # noqa: B010
        assert vars(package)["loads"] is found
        assert vars(package)["other"] is sys
    finally:
        del sys.modules["of_a_test"]


def test_planning_imports_no_torch() -> None:
    modules = "weft, weft.compiler.pipeline, weft.strategy"
    assert in_fresh(f"import {modules}, sys; print('torch' in sys.modules)") == "False\n"
    script = (
        "import weft, sys; weft.placement('cpu', [0]); weft.split(0); print('torch' in sys.modules)"
    )
    assert in_fresh(script) == "False\n"


INTERRUPTED = """
import importlib.abc, os, signal, sys, weft

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch.nn", "sympy.core"):
            os.kill(os.getpid(), signal.SIGINT)

finder = Interrupting()
sys.meta_path.insert(0, finder)
try:
    weft.compile
except KeyboardInterrupt:
    print("interrupted")
sys.meta_path.remove(finder)
import torch
model = torch.nn.Linear(2, 2)
program = weft.compile(
    model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1),
    torch.ones(2, 2), placement=weft.placement("cpu", [0]),
)
print(program.step(torch.ones(2, 2)).shape)
"""


@pytest.mark.slow
def test_an_interrupt_leaves_no_half_of_a_module() -> None:
    assert in_fresh(INTERRUPTED).splitlines() == ["interrupted", "torch.Size([])"]


def test_handlers_of_users_are_left_alone() -> None:
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    try:
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
            assert found == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
