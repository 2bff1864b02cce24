"""What is looked at, and what is said where something is missing."""

from __future__ import annotations

import json
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from weft.cli.main import app
from weft.runtime import doctor
from weft.runtime.doctor import CheckResult, check_machine


def of(about: str) -> CheckResult:
    (found,) = [check for check in check_machine() if check.about == about]
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
    assert of("torch") == CheckResult("torch", "2.9.1+cpu", "bad", "install torch 2.11 or later")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "weft cannot run as this is" in done.output


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1 << 20))
    found = of("/dev/shm")
    assert (found.state, "1.0 MiB free" in found.found) == ("note", True)
    assert "shm-size" in found.advice
    # Ranks of one host talk by memory that has no place there.
    assert of("shared memory").state == "ok"


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "MEMORY", tmp_path / "shm")
    monkeypatch.setattr(doctor, "host", lambda: "")
    assert of("shared memory").found == "not on this system: ranks of one host talk over Gloo"

    def hidden() -> str:
        raise FileNotFoundError(2, "No such file or directory", "/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(doctor, "host", hidden)
    assert (of("shared memory").state, of("shared memory").advice) == (
        *("bad", "set WEFT_TRANSPORT=gloo"),
    )


@pytest.mark.parametrize(
    ("limits", "found", "advice"),
    [
        ((256, 1 << 20), "256 at most", "ulimit -n 4096"),
        ((256, 2000), "256 at most", "ulimit -n 2000"),
        ((256, resource.RLIM_INFINITY), "256 at most", "ulimit -n 4096"),
        (
            *((256, 256), "256 at most"),
            "have root raise the limit (docker run --ulimit nofile=4096)",
        ),
        ((1024, 1024), "1024 at most", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "as many as wanted", ""),
    ],
)
def test_open_files(
    limits: tuple[int, int], found: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert of("open files") == CheckResult("open files", found, "note" if advice else "ok", advice)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_compiler", lambda _: "install g++ or set CXX")
    assert of("compiler").advice == "install g++ or set CXX"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("WEFT_MALLOC", "mine"), ("WEFT_TIMEOUT", "soon"), ("WEFT_TRANSPORT", "tcp")),
        *(("WEFT_PLAN_COSTS", "mine"), ("WEFT_CUDA_GRAPHS", "yes"), ("WEFT_SECRET", "short")),
    ],
)
def test_wrong_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    found = of("variables")
    assert found.state == "bad"
    assert name in found.advice


def test_a_variable_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIME_OUT", "5")
    found = of("variables")
    assert found.state == "note"
    assert "WEFT_TIME_OUT" in found.advice


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
    shown: Any = json.dumps([vars(check) for check in check_machine()])
    assert "0123456789abcdef" not in shown
