"""`weft run` with real processes. Most scripts use no torch, so that a run takes about as long as starting it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The bound on how long a failure may keep the other ranks.
SECONDS = 200

WAIT = "import os, sys, threading\nfrom pathlib import Path\n"


def command(script: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft", "run", "-n", "2", str(script), *arguments]


def run(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(WAIT + text)
    return subprocess.run(
        command(script, *arguments), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )


def test_every_rank_runs_the_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").touch()
    text = (
        "import neighbour\n"
        "assert __name__ == '__main__'\n"
        "name = os.environ['RANK'] + os.environ['WORLD_SIZE']\n"
        "Path(name).write_text(' '.join(sys.argv[1:]))\n"
    )
    result = run(tmp_path, text, "--steps", "3", "-n", "5")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "02").read_text() == "--steps 3 -n 5"
    assert (tmp_path / "12").read_text() == "--steps 3 -n 5"


def test_the_rank_that_raises_ends_the_run_and_its_traceback_stands_once(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "def train():\n    raise ValueError('no such [batch]')\n"
        "if os.environ['RANK'] == '1':\n    train()\n"
        "threading.Event().wait()\n",
    )
    assert result.returncode == 1
    assert "rank 1 failed: ValueError: no such [batch]" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert "in train" in result.stderr
    assert "runpy" not in result.stderr


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "import signal\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Event().wait()\n",
    )
    assert result.returncode == 1
    assert "rank 1 (process" in result.stderr
    assert "signal 9 (SIGKILL)" in result.stderr


def test_a_thread_that_waits_for_ever_does_not_hold_a_failed_rank(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "threading.Thread(target=threading.Event().wait).start()\nraise RuntimeError('stuck')\n",
    )
    assert result.returncode == 1
    assert "RuntimeError: stuck" in result.stderr


CAUGHT = """
import os, torch, weft
from weft.errors import RankFailure
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = {"x": torch.randn(8, 4)}
loss = lambda model, batch: model(batch["x"]).square().mean()
program = weft.compile(model, loss, optimizer, batch, placement=weft.placement("cpu", [0, 1]))
try:
    program.full_state_dict() if os.environ["RANK"] == "0" else program.step(batch)
except RankFailure:
    Path("told" + os.environ["RANK"]).touch()
"""


def test_a_thread_that_waits_inside_torch_does_not_abort_a_rank_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's waits end when the peer does, as the interpreter is taken down."""
    monkeypatch.setenv("WEFT_TRANSPORT", "gloo")
    result = run(tmp_path, CAUGHT)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.glob("told*")} == {"told0", "told1"}


def test_nothing_is_left_in_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what torch makes there when it is imported."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    result = run(tmp_path, f"import torch._dynamo\nassert os.listdir({str(temporary)!r})\n")
    assert result.returncode == 0, result.stderr
    assert not list(temporary.iterdir())


def test_an_exit_code_of_the_script_fails_the_run(tmp_path: Path) -> None:
    result = run(tmp_path, "if os.environ['RANK'] == '0': sys.exit(3)\n")
    assert result.returncode == 1
    assert "rank 0 (process" in result.stderr
    assert "exit code 3" in result.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        WAIT + "Path(os.environ['RANK']).write_text(str(os.getpid()))\nthreading.Event().wait()\n"
    )
    with subprocess.Popen(command(script), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        try:
            pids = [wait_for_pid(tmp_path / rank) for rank in "01"]
            run.send_signal(how)
            _, stderr = run.communicate(timeout=SECONDS)
        finally:
            run.kill()
    assert run.returncode == 130
    assert "interrupted: all ranks were stopped" in stderr
    assert "Traceback" not in stderr
    assert not any(alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux only")
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        WAIT + "Path(os.environ['RANK']).write_text(str(os.getpid()))\nthreading.Event().wait()\n"
    )
    with subprocess.Popen(command(script), cwd=tmp_path) as run:
        try:
            pids = [wait_for_pid(tmp_path / rank) for rank in "01"]
        finally:
            run.kill()
    deadline = time.monotonic() + SECONDS
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is still there"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux only")
def test_a_rank_whose_launcher_is_gone_already_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    worker = [sys.executable, "-m", "weft.cli.worker", str(script)]
    for launcher, code in ((os.getpid(), 7), (os.getppid(), 1)):
        environment = {**os.environ, "WEFT_LAUNCHER": str(launcher)}
        done = subprocess.run(worker, env=environment, timeout=SECONDS, check=False)
        assert done.returncode == code


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"rank {path.name} did not start"
    return int(path.read_text())


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not collected yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z" if status.exists() else True
    except (FileNotFoundError, ProcessLookupError):
        return False
