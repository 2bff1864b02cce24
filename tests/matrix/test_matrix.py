"""Which pairs of Python and torch there are, what is installed for them, and what runs where there is no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import matrix
from tools.matrix import ROOT, Cell, cells, constraints, cpu_versions, interpreters, page, rows_of
from tools.scores.stamp import stamp_now

TOLD = """torch (2.15.0)
Available versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.11.0+cpu, 2.11.0, 2.9.1+cpu
"""


def test_only_torch_for_cpus_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "said", lambda *_, **__: TOLD)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cpu_versions("python3") == ["2.9.1", "2.11.0", "2.13.0"]
    text = (ROOT / "constraints.txt").read_text()
    changed = constraints(text, "2.11.0").splitlines()
    assert [line for line in changed if line not in text.splitlines()] == ["torch==2.11.0+cpu"]
    assert "torch" not in constraints(text, "")


def test_missing_interpreters_are_said_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert [version for version, _ in interpreters([own, "3.99"])] == [own]
    assert "python3.99 is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["2.9.1", "2.11.0", "2.13.0"], [("2.11.0", "oldest"), ("2.13.0", "newest")]),
        (["2.13.0"], [("", "oldest"), ("2.13.0", "newest")]),
        (["2.11.0"], [("2.11.0", "oldest and newest")]),
        (["2.9.1"], [("", "oldest and newest")]),
    ],
)
def test_the_oldest_and_the_newest_are_tried(
    there: list[str], expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "cpu_versions", lambda program: there)
    monkeypatch.setattr(matrix, "interpreters", lambda versions: [("3.11", "python3.11")])
    assert [(cell.torch, cell.wanted) for cell in cells()] == expected


def test_rows_survive_a_page() -> None:
    rows = {("3.10", Cell("3.10", "", "", "oldest").name): "7 passed", ("3.9", "x"): "1 failed"}
    assert rows_of(page(rows, stamp_now("make matrix", ["tests/matrix"]))) == rows


def test_without_torch_what_needs_it_is_skipped_and_all_else_runs(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    (tmp_path / "test_imports.py").write_text("import torch\n\ndef test_it(): ...\n")
    (tmp_path / "test_other.py").write_text(
        "def test_later():\n    import torch\n\ndef test_free(): ...\n\n"
        "def test_wrong():\n    import no_such_module\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.without_torch", "-p"]
    command += ["no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    path = f"{tmp_path}:{ROOT}"
    told = subprocess.run(
        command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert "1 failed, 1 passed, 2 skipped" in told.stdout, told.stdout + told.stderr
