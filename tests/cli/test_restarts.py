"""`weft run --restarts`: after a rank has died the run goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import weft
from cli.listening import listening
from program.data.datasets import Drawn, plain_losses
from weft.cli import run
from weft.runtime.world.launch import Exit, LaunchResult, NodeProcesses

SCRIPT = Path(__file__).with_name("dies_on_ranks.py")
SIZE = 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "size"),
    [(("--min-ranks", "1"), 1), pytest.param((), 2, marks=pytest.mark.thorough)],
)
def test_the_run_goes_on(options: tuple[str, ...], size: int, tmp_path: Path) -> None:
    """On as many ranks, or on what is left: with the losses of a run that nothing has disturbed."""
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "--restarts", "3", *options]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path), "1"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "restart 1 of 3" in done.stderr
    _check_losses(tmp_path, {(0, 2), (1, size)})


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "weft",
        "run",
        "-n",
        "1",
        "--restarts",
        "1",
        "--min-ranks",
        "1",
    ]
    command += [
        "--nodes",
        "2",
        "--rendezvous",
        f"127.0.0.1:{port}",
        "--run-id",
        "a",
        "--timeout",
        "60",
    ]
    command += [str(SCRIPT), str(tmp_path), "1", "host"]
    environment = {**os.environ, "WEFT_SECRET": "a secret that nobody can guess"}
    with ExitStack() as stack:
        nodes = []
        for _ in range(2):
            run = stack.enter_context(
                subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            )
            stack.callback(run.kill)
            nodes.append(run)
            while not listening({nodes[0].pid})[0]:  # the first one keeps the store
                assert nodes[0].poll() is None
        errors = nodes[0].communicate(timeout=150)[1]
        assert nodes[0].returncode == 0, errors
        assert nodes[1].wait(10) == -signal.SIGKILL
    assert "restart 1 of 1, with the nodes that join" in errors
    _check_losses(tmp_path, {(0, 2), (1, 1)})


def _check_losses(folder: Path, starts: set[tuple[int, int]]) -> None:
    """The starts and their ranks are these, losses are those of plain PyTorch, and few steps were made again."""
    found = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    assert {(start, ranks) for start, ranks, *_ in found} == starts
    losses = {int(step): loss for *_, step, loss in found}
    # One, and the one that was under way, which the first rank may have told of.
    assert len(found) - len(losses) <= 2
    batches = weft.Loader(Drawn(), SIZE, shuffle=True, drop_last=True)
    assert losses == pytest.approx(dict(enumerate(plain_losses(batches, 2), 1)), rel=1e-12)


@pytest.mark.parametrize(
    ("least", "deaths", "ranks"),
    [(None, 9, [4, 4, 4, 4]), (2, 9, [4, 3, 2, 2]), (2, 1, [4, 3]), (None, 0, [4])],
)
def test_restarts_have_an_end(
    least: int | None,
    deaths: int,
    ranks: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And each start knows how many there were before."""
    starts: list[int] = []

    def start(
        _: Sequence[str], fleet: NodeProcesses, environment: Mapping[str, str], **__: Any
    ) -> LaunchResult:
        assert environment["WEFT_RESTART"] == str(len(starts))
        starts.append(fleet.ranks)
        return LaunchResult((Exit(1, 101, int(len(starts) <= deaths)),))

    monkeypatch.setattr(run, "launch", start)
    options = run.RunOptions(4, restarts=3, least=least)
    assert run.run_script(Path("script.py"), (), options) == int(deaths > 3)
    assert starts == ranks
    said = capfd.readouterr().err
    assert said.count("rank 1 (process 101) ended with exit code 1") == min(deaths, 4)
    for number in (1, 2, 3):
        assert (f"restart {number} of 3" in said) == (number < len(ranks))
