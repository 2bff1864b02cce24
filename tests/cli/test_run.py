"""`weft run` with real processes. Most scripts use no torch, so that a run takes about as long as starting it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def test_every_rank_runs_the_script_with_its_arguments_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what torch makes in the folder for temporary files when it is imported."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "neighbour.py").touch()
    text = (
        "import neighbour, torch._dynamo\n"
        f"assert os.listdir({str(temporary)!r})\n"
        "assert __name__ == '__main__'\n"
        "name = os.environ['RANK'] + os.environ['WORLD_SIZE']\n"
        "Path(name).write_text(' '.join(sys.argv[1:]))\n"
    )
    result = run(tmp_path, text, "--steps", "3", "-n", "5")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "02").read_text() == "--steps 3 -n 5"
    assert (tmp_path / "12").read_text() == "--steps 3 -n 5"
    assert not list(temporary.iterdir())


def test_the_rank_that_raises_ends_the_run_and_its_traceback_stands_once(tmp_path: Path) -> None:
    """A thread that waits for ever does not hold it."""
    result = run(
        tmp_path,
        "threading.Thread(target=threading.Event().wait).start()\n"
        "def train():\n    raise ValueError('no such [batch]')\n"
        "if os.environ['RANK'] == '1':\n    train()\n"
        "threading.Event().wait()\n",
    )
    assert result.returncode == 1
    assert "rank 1 failed: ValueError: no such [batch]" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert "in train" in result.stderr
    assert "runpy" not in result.stderr


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


@pytest.mark.thorough
def test_a_thread_that_waits_inside_torch_does_not_abort_a_rank_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's waits end when the peer does, as the interpreter is taken down."""
    monkeypatch.setenv("WEFT_TRANSPORT", "gloo")
    result = run(tmp_path, CAUGHT)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.glob("told*")} == {"told0", "told1"}


IDLE = "os.write(1, b'%d\\n' % os.getpid())\nthreading.Event().wait()\n"


@contextmanager
def idle(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run whose ranks do nothing, and their process ids."""
    script = tmp_path / "script.py"
    script.write_text(WAIT + IDLE)
    pipe = subprocess.PIPE
    with subprocess.Popen(command(script), stdout=pipe, stderr=pipe, text=True) as run:
        try:
            assert run.stdout is not None
            yield run, [int(run.stdout.readline()) for _ in range(2)]
        finally:
            run.kill()


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    """Other signals: see the tests of `Interrupts`."""
    with idle(tmp_path) as (run, pids):
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=SECONDS)
    assert run.returncode == 130
    assert "interrupted: all ranks were stopped" in stderr
    assert "Traceback" not in stderr
    assert not any(alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux only")
def test_no_rank_outlives_a_launcher_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with idle(tmp_path) as (_, pids):
        pass
    (left,) = place.glob("weft-*")
    others = [place / "weft-of-others", place / "weft-run-file"]
    others[0].mkdir()
    others[1].write_text("")
    deadline = time.monotonic() + SECONDS
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is still there"
    # Its folder goes when the next one begins.
    script = tmp_path / "next.py"
    script.write_text("")
    assert subprocess.run(command(script), timeout=SECONDS, check=False).returncode == 0
    assert not left.exists()
    assert all(each.exists() for each in others)


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
