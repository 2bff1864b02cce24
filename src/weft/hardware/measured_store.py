"""This machine: what `weft measure` found out about it, kept on disk for plans and simulations. Needs no
torch.

Figures are below the folder `measured` of `WEFT_CACHE`, or of the user's folder for caches: a folder for each
fingerprint of machine and torch, in it a file for each number of ranks, processes and threads that were at work, and
below `planned` the figures that plans use. Nobody but the user may write there: figures decide plans.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.errors import UserError
from weft.hardware.costs import default_device
from weft.hardware.measured_costs import (
    DEVICE,
    PROCESSES,
    RANKS,
    THREADS,
    MeasuredCosts,
    Measurements,
    from_json,
    planned_figures,
    to_json,
)
from weft.private import FOLDER, chosen_folder, default_folder, is_private, make_private
from weft.units import counted


@cache
def cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def this_machine() -> dict[str, str | int]:
    """The facts of this machine and its torch that measurements hold for."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {"processor": _processor(), "cores": cores(), "torch": torch}


def _processor() -> str:
    """The name of the processor, as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def measured_folder() -> Path:
    """The folder of this machine's measurements with its torch; it need not be there."""
    facts = "\n".join(f"{name} {fact}" for name, fact in this_machine().items())
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return (chosen_folder() or default_folder()) / "measured" / fingerprint


def store_measurements(found: Measurements) -> Path:
    """Keep measurements of this machine, with those that are kept already for as many ranks; returns their file.

    A file that is damaged is replaced.

    Raises:
        UserError: the folder cannot be written, or others may write to it.
    """
    numbers = "_".join(f"{_number(found, name)}_{name}" for name in _NUMBERS)
    path = measured_folder() / f"{found.machine.get(DEVICE, 'cpu')}_{numbers}.json"
    planned = path.parent / _PLANNED / path.name
    try:
        make_private(planned.parent, _INSTEAD)
        before = _whole(path)
        every = found if before is None else before.joined(found)
        _write(path, every)
        _write(planned, planned_figures(_whole(planned), every))
    except OSError as error:
        raise UserError(
            f"cannot keep what was measured in {path} ({error}): set {FOLDER} to a folder that can be written"
        ) from None
    return path


def _write(path: Path, found: Measurements) -> None:
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.stem, suffix=".part", delete=False
    ) as file:
        file.write(to_json(found))
    Path(file.name).replace(path)


def stored_measurements(
    device_type: str = "cpu", planned: bool = False
) -> tuple[Measurements, ...]:
    """The stored measurements of this machine with its torch, by ranks, processes and threads.

    Args:
        device_type: "cpu" or "cuda".
        planned: as plans take it: settled.

    Raises:
        UserError: a file is damaged, or of another version of weft; names it. Or others may write to it.
    """
    folder = measured_folder() / _PLANNED if planned else measured_folder()
    if folder.exists():
        make_private(folder, _INSTEAD)
    found = (_read(path) for path in sorted(folder.glob("*.json")))
    own = (each for each in found if each is not None and each.machine.get(DEVICE) == device_type)
    return tuple(sorted(own, key=lambda each: tuple(_number(each, name) for name in _NUMBERS)))


_INSTEAD = f"set {FOLDER} to a folder of your own, where nobody else may write"
_NUMBERS = (RANKS, PROCESSES, THREADS)
# One of each.
_ONE = {RANKS: "rank", PROCESSES: "process", THREADS: "thread"}
_PLANNED = "planned"


def load_measurements(
    ranks: int = 1,
    device_type: str = "cpu",
    processes: int | None = None,
    threads: int | None = None,
    planned: bool = False,
) -> MeasuredCosts | None:
    """The costs of this machine while so many ranks are at work; None if nothing was measured.

    Where there are none for this number of ranks, measurements for the nearest one are taken; all of its
    costs are marked as estimates.

    Args:
        ranks: at work at the same time.
        device_type: "cpu" or "cuda".
        processes: that they run in; by default one for each.
        threads: of each rank; None for any.
        planned: as plans take them: settled.

    Raises:
        UserError: a file is damaged, or of another version of weft; names it.
    """
    wanted = {RANKS: ranks, PROCESSES: ranks if processes is None else processes}
    if threads is not None:
        wanted[THREADS] = threads
    every = stored_measurements(device_type, planned)
    if not every:
        return None

    def apart(each: Measurements) -> tuple[bool, int, bool, bool]:
        count, several = _number(each, RANKS), _number(each, PROCESSES) > 1
        other = count > 1 and several != (wanted[PROCESSES] > 1)
        less = count < ranks
        return other, abs(count - ranks), less, _number(each, THREADS) != threads

    best = min(every, key=apart)
    differs = [
        f"{counted(_number(best, name), _ONE[name], name)} in place of {number}"
        for name, number in wanted.items()
        if _number(best, name) != number
    ]
    stands_in = f"measured with {', '.join(differs)}" if differs else ""
    return MeasuredCosts(best, default_device(device_type), stands_in)


def load_measured_costs(
    ranks: int = 1,
    device_type: str = "cpu",
    processes: int | None = None,
    threads: int | None = None,
) -> MeasuredCosts:
    """Like `load_measurements`; where nothing was measured, the usual figures of the device type, marked as
    estimates.
    """
    found = load_measurements(ranks, device_type, processes, threads)
    if found is not None:
        return found
    facts = {**this_machine(), DEVICE: device_type, RANKS: ranks}
    return MeasuredCosts(Measurements(facts), default_device(device_type))


def _read(path: Path) -> Measurements | None:
    try:
        if not is_private(path):
            raise UserError(f"another user may have written {path}: delete it, or {_INSTEAD}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); run `weft measure` again") from None
    return from_json(text, str(path))


def _whole(path: Path) -> Measurements | None:
    """The measurements of a file; None if there is none, or a damaged one."""
    try:
        return _read(path)
    except UserError:
        return None


def _number(found: Measurements, name: str) -> int:
    number = found.machine.get(name, 1)
    return number if isinstance(number, int) else 1
