"""What is looked at, and what is said where something is missing."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from weft.cli.main import app
from weft.runtime import doctor
from weft.runtime.doctor import Checkup, look_over


def of(about: str) -> Checkup:
    (found,) = [check for check in look_over() if check.about == about]
    return found


def test_here_it_can_run() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "weft can run here" in done.output
    assert torch.__version__ in done.output
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert {each["about"] for each in json.loads(done.output)} >= {"torch", "CPU", "Gloo", "cache"}


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert of("torch") == Checkup("torch", "2.9.1+cpu", "bad", "install torch 2.11 or later")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "weft cannot run as this is" in done.output


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1 << 20))
    found = of("shared memory")
    assert (found.state, "1.0 MiB free" in found.found) == ("note", True)
    assert "shm-size" in found.advice


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_compiler", lambda _: "install g++ or set CXX")
    assert of("compiler").advice == "install g++ or set CXX"


@pytest.mark.parametrize(("name", "value"), [("WEFT_MALLOC", "mine"), ("WEFT_TIMEOUT", "soon")])
def test_wrong_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    found = of("variables")
    assert found.state == "bad"
    assert name in found.advice


def test_a_cache_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("WEFT_CACHE", str(folder))
    found = of("cache")
    assert found.state == "bad"
    assert str(folder) in found.advice


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SECRET", "0123456789abcdef")
    shown: Any = json.dumps([vars(check) for check in look_over()])
    assert "0123456789abcdef" not in shown
