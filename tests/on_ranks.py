"""Ranks as real processes, forked from one that has imported weft: a job takes a second, not five for every rank.

`run_ranks` is for tests; started as a program, this module is the process that forks.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest  # noqa: F401  (what is imported here, ranks need not import)
import torch

import weft
from weft.runtime.world.meeting import MEETING, meet_in_file

# Seconds that importing everything may take on a busy machine.
START = 100


def run_ranks(
    script: Path,
    size: int,
    *arguments: str,
    folder: Path | None = None,
    seconds: int = 200,
    **variables: str,
) -> list[tuple[str, int]]:
    """Run a script on every rank, as `weft run` does, but go on when one fails.

    Args:
        script: a program; it finds RANK, LOCAL_RANK and WORLD_SIZE in its environment.
        size: how many ranks.
        arguments: of the script.
        folder: where the script is run.
        seconds: after which a rank that hangs says where, and ends with exit code 1.
        variables: of the environment; with MASTER_PORT the ranks meet there, else in a file.

    Returns:
        for each rank what it wrote to stdout and stderr, and its exit code.
    """
    with tempfile.TemporaryDirectory(prefix="weft-") as own:
        command = [sys.executable, __file__, own, str(size), str(seconds), str(script), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        limit = START + seconds
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=limit)
        codes = json.loads(Path(own, "codes").read_text())
        return [(Path(own, str(rank)).read_text(), code) for rank, code in enumerate(codes)]


def passed(script: Path, size: int, *arguments: str, **options: Any) -> list[str]:
    """What each rank wrote, where all of them ended well."""
    ended = run_ranks(script, size, *arguments, **options)
    assert all(code == 0 for _, code in ended), "\n".join(output[-3000:] for output, _ in ended)
    return [output for output, _ in ended]


def _warm() -> None:
    """Compile once here: what is looked up on the way is there in all ranks."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        program = weft.compile(model, _loss, optimizer, x, placement=placement)
        program.step(x)
        program.close()
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.freeze()


def _loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def _run(folder: Path, size: int, seconds: int, script: str, arguments: list[str]) -> None:
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _be(rank, folder, size, seconds)
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
            return  # and end as any process does
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes").write_text(json.dumps(codes))


def _be(rank: int, folder: Path, size: int, seconds: int) -> None:
    output = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    if "MASTER_PORT" not in os.environ:
        os.environ[MEETING] = str(folder / "meeting")
    meet_in_file()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _warm()
    _run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
