"""Faults tried one after the other: `make chaos`, or `python -m benchmarks.chaos --faults 200 --seed 0`.

A run on 2 to 4 ranks trains with a checkpoint every few steps; a rank of it meets a fault at a moment drawn at random:
while it starts, compiles, loads a sample, steps, saves or loads. `weft run --restarts` goes on. Then losses, samples of
each step and last parameters must be those of a run that nothing has disturbed, and nothing may be left behind. With
`--cuts` the network of a run on several hosts is cut instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

import weft
from benchmarks.chaos.cuts import UNNOTICED, Cut, drawn_cut, run_cut
from benchmarks.chaos.training import (
    BATCH,
    MOMENTS,
    STEPS,
    Samples,
    example,
    loss_fn,
    net,
)
from benchmarks.measure import machine
from weft.units import Seconds

SCRIPT = Path(__file__).with_name("training.py")
HOWS = ("kill", "stop", "term", "segv", "hang", "raise", "exit", "leave")
# Seconds of silence after which a rank counts as lost; and those that a run may take.
SILENCE, LIMIT = Seconds(4.0), Seconds(120.0)
# The variable by which processes of a run are found.
MARK = "WEFT_CHAOS"


@dataclass(frozen=True)
class Fault:
    """What happens in a run.

    Attributes:
        number: of the fault, which all else is drawn by.
        ranks: of the run.
        fewer: whether it goes on with one rank fewer.
        rank, moment, count: who meets it: the rank that comes to the moment for that time.
        how: what it does then.
        damage: what happens to the newest checkpoint before the ranks start again: "", "cut" or "removed".
    """

    number: int
    ranks: int
    fewer: bool
    rank: int
    moment: str
    count: int
    how: str
    damage: str

    def __str__(self) -> str:
        where = f"rank {self.rank} of {self.ranks}, {self.moment} {self.count}"
        after = f", newest checkpoint {self.damage}" if self.damage else ""
        return f"{self.how} at {where}{after}"


class Outcome(NamedTuple):
    """What was found after a fault.

    Attributes:
        wrong: what is not as it should be.
        came: whether the fault did.
        again: the most steps that were made again.
        seconds: that the run took.
    """

    wrong: list[str]
    came: bool
    again: int
    seconds: float

    def __str__(self) -> str:
        came = f"{self.again} steps again" if self.came else "its moment never came"
        return f"{'; '.join(self.wrong) or f'ok, {came}'} ({self.seconds:.1f} s)"


def drawn(number: int, seed: int) -> Fault:
    """The fault of a number."""
    draw = random.Random(f"{seed} {number}")
    ranks = draw.randint(2, 4)
    moment = draw.choice(list(MOMENTS))
    how = draw.choice([*HOWS, "full"] if moment == "save" else HOWS)
    damage = draw.choice(["", "", "cut", "removed"]) if moment != "load" else ""
    count = draw.randint(1, MOMENTS[moment])
    rank, fewer = draw.randrange(ranks), draw.random() < 0.5
    return Fault(number, ranks, fewer, rank, moment, count, how, damage)


def main() -> int:
    """Returns 1 when something was wrong after a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first fault")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="that it may take")
    parser.add_argument("--cuts", type=int, default=0, help="cut networks in place of faults")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    expected, until = undisturbed(), time.monotonic() + 60 * o.minutes
    rows: list[dict[str, Any]] = []
    for number in range(o.first, o.first + (o.cuts or o.faults)):
        if time.monotonic() > until:
            break
        fault = drawn_cut(number, o.seed) if o.cuts else drawn(number, o.seed)
        outcome = tried(fault, expected)
        rows.append({**asdict(fault), **outcome._asdict()})
        print(f"{number}: {fault}: {outcome}", flush=True)
        if o.json:
            o.json.write_text(json.dumps({"machine": machine(), "faults": rows}, indent=1))
    wrong = [row for row in rows if row["wrong"]]
    came = Counter(row["how"] for row in rows if row["came"])
    hows = ", ".join(f"{how} {number}" for how, number in sorted(came.items()))
    print(f"{came.total()} faults that came, of {len(rows)} ({hows})")
    most = max(row["again"] for row in rows)
    print(f"{len(wrong)} after which something was wrong; at most {most} steps made again")
    return int(bool(wrong))


def tried(fault: Fault | Cut, expected: Expected) -> Outcome:
    """Make a run with a fault, and say what is wrong after it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        folder, temporary = Path(made, "run"), Path(made, "tmp")
        folder.mkdir()
        temporary.mkdir()
        there, begun = set(Path("/dev/shm").iterdir()), time.monotonic()
        variables = {MARK: _mark(fault), "TMPDIR": str(temporary)}
        if isinstance(fault, Cut):
            code, said, wrong = _cut(fault, folder, variables)
        else:
            code, said, wrong = _run(fault, folder, variables)
        seconds = time.monotonic() - begun
        last = folder / "last.safetensors"
        state = load_file(last) if last.exists() else {}
        found = [*wrong_with(folder, code, said, expected, state), *wrong]
        found += _left_behind(fault, there, temporary)
        return Outcome(found, (folder / "done").exists(), _again(folder), seconds)


def _left_behind(fault: Fault | Cut, there: set[Path], temporary: Path) -> Iterator[str]:
    """What a run has left: processes, files, memory that was not `there` before."""
    yield from (f"process {pid} is left" for pid in _left(fault))
    yield from (f"{path.name} is left in TMPDIR" for path in temporary.iterdir())
    new = set(Path("/dev/shm").iterdir()) - there
    yield from (f"{path} is left" for path in new if path.exists())


class Expected(NamedTuple):
    """The run that nothing has disturbed: samples and loss of each step, and the last parameters."""

    samples: list[list[int]]
    losses: list[float]
    state: dict[str, torch.Tensor]


def undisturbed() -> Expected:
    """Train on one rank of this process."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = weft.compile(
        *(model, loss_fn, optimizer, example()), placement=weft.placement("cpu", [0]), seed=5
    )
    loader = weft.Loader(Samples(), BATCH, shuffle=True, drop_last=True, seed=2)
    samples, losses = [], []
    while program.steps < STEPS:
        for batch in loader:
            losses.append(program.step(batch).item())
            samples.append(sorted(batch["number"].tolist()))
    state = program.full_state_dict()
    program.close()
    return Expected(samples, losses, state)


def untold(fault: Fault, damaged: str, steps: Sequence[int], said: str) -> Iterator[str]:
    """What a run has not named: the rank that failed, where ranks went on; a damaged checkpoint that it passed over.

    Args:
        fault: of the run.
        damaged: the name of the checkpoint; "" for none.
        steps: in the order in which they were made.
        said: by the run.
    """
    if "restart 1 of" in said and f"rank {fault.rank}" not in said:
        yield f"rank {fault.rank} is not named"
    number = int(damaged.removeprefix("step-") or 0)
    passed = any(b <= number <= a for a, b in pairwise(steps) if b <= a)
    if number and passed and damaged not in said:
        yield f"{damaged} is damaged, and not named"


def _run(fault: Fault, folder: Path, variables: Mapping[str, str]) -> tuple[int, str, list[str]]:
    """The exit code, what was said, and what was not; -1 after `LIMIT` seconds."""
    (folder / "fault.json").write_text(json.dumps(asdict(fault)))
    command = [sys.executable, "-m", "weft", "run", "-n", str(fault.ranks), "--restarts", "3"]
    command += ["--timeout", str(SILENCE)]
    command += ["--min-ranks", str(fault.ranks - 1)] if fault.fewer else []
    damaging, log = _Damage(fault, folder), folder / "said"
    # A file: a pipe that nobody reads holds up who writes much.
    with log.open("w") as opened:
        process = subprocess.Popen(
            [*command, str(SCRIPT), str(folder)],
            env={**os.environ, **variables},
            stdout=opened,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < until:
            damaging.look()
            time.sleep(0.02)
    code = process.poll()
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = log.read_text(errors="replace")
    wrong = list(untold(fault, damaging.name, _steps(folder), said))
    return -1 if code is None else code, said, wrong


def _cut(cut: Cut, folder: Path, variables: dict[str, str]) -> tuple[int, str, list[str]]:
    """The same of a run with a cut."""
    run = run_cut(cut, folder, variables)
    noticed = cut.seconds < UNNOTICED and (run.restarts or any(run.others))
    told = f"{run.restarts} restarts, exit codes {run.others} after so short a cut"
    return run.code, run.said, [told] if noticed else []


class _Damage:
    """Damages the newest checkpoint once, as soon as the fault has come.

    Args:
        fault: says how.
        folder: of the run.

    Attributes:
        name: of that checkpoint; "" as long as there is none.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.name = ""
        self._fault = fault
        self._folder = folder
        self._done = not fault.damage

    def look(self) -> None:
        """Do it if it is time."""
        if self._done or not (self._folder / "done").exists():
            return
        self._done = True
        every = weft.Checkpoints(self._folder / "kept").all()
        # With one alone there would be none before it.
        for shard in sorted(every[-1].glob("shard-*"))[:1] if len(every) > 1 else ():
            self.name = every[-1].name
            if self._fault.damage == "removed":
                shard.unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):
                    os.truncate(shard, shard.stat().st_size // 2)


def wrong_with(
    folder: Path, code: int, said: str, expected: Expected, state: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """The faults of a run that has ended: what is not as in the run that nothing has disturbed.

    Args:
        folder: of the run.
        code, said: exit code, and what was written; -1 where it did not end.
        expected: of the other run.
        state: the last parameters.
    """
    end = " | ".join(said.strip().splitlines()[-3:])[-300:]
    if code == -1:
        yield f"it hung: {end}"
        return
    if code:
        yield f"exit code {code}: {end}"
        return
    yield from _wrong_steps(folder, expected)
    if state.keys() != expected.state.keys():
        yield f"the last parameters are {sorted(state)}"
        return
    for name, value in expected.state.items():
        if not torch.allclose(state[name], value, rtol=1e-8, atol=1e-10):
            yield f"{name} is off by {float((state[name] - value).abs().max()):.1e}"


def _wrong_steps(folder: Path, expected: Expected) -> Iterator[str]:
    """Steps that are missing, or had another loss or other samples when they were made last."""
    rows = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
    last = {step: (loss, samples) for step, loss, samples in rows}
    if sorted(last) != list(range(1, STEPS + 1)):
        yield f"steps {sorted(last)}"
        return
    for step, (loss, samples) in sorted(last.items()):
        if samples != expected.samples[step - 1]:
            yield f"step {step} had the samples {samples}, not {expected.samples[step - 1]}"
        if abs(loss - expected.losses[step - 1]) > 1e-9 * abs(expected.losses[step - 1]):
            yield f"step {step} had the loss {loss!r}, not {expected.losses[step - 1]!r}"


def _again(folder: Path) -> int:
    """The most steps that were made again after the fault."""
    return max((a - b + 1 for a, b in pairwise(_steps(folder)) if b <= a), default=0)


def _steps(folder: Path) -> list[int]:
    """The steps in the order in which they were made."""
    there = folder / "steps"
    return [json.loads(x)[0] for x in there.read_text().splitlines()] if there.exists() else []


def _left(fault: Fault | Cut) -> list[int]:
    """The processes of the run that are still there; they are ended."""
    mark, found = f"{MARK}={_mark(fault)}".encode(), []
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and int(each.name) != os.getpid():
            with suppress(OSError):
                if mark in (each / "environ").read_bytes().split(b"\0"):
                    found.append(int(each.name))
                    os.kill(int(each.name), signal.SIGKILL)
    return found


def _mark(fault: Fault | Cut) -> str:
    return f"{os.getpid()}-{fault.number}"


if __name__ == "__main__":
    sys.exit(main())
