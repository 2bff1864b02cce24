"""The folder of a host in which snapshots lie: which are there, and what goes when.

    <folder of the host>/<name of the checkpoints>/start-00001/0/rank-00002/shard-….safetensors, record.json

Each start of the program has a folder of its own, in it two for generations, which take turns, and in each one for what
each process has saved: that of the process itself on its own host, and the copy on its buddy's. A folder counts
once it has its record; while files are written it has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from weft.errors import UNREADABLE, UserError
from weft.private import make_private
from weft.runtime.world.variables import SNAPSHOTS

# A record that counts, and one whose generation may not be whole.
RECORD, UNSURE = "record.json", "record.unsure"
# Generations that take turns.
TURNS = 2
_START = "start-"


@final
@dataclass(frozen=True)
class HeldPart:
    """The part of a snapshot that one process saved, as it lies on a host.

    Attributes:
        start: of the program, from 1.
        turn: 0 or 1.
        step: after which it was taken.
        process: the first rank of the process.
        processes: how many have saved a part.
        whole: True where all processes had theirs, and buddies their copies.
        files: bytes by name.
    """

    start: int
    turn: int
    step: int
    process: int
    processes: int
    whole: bool
    files: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def host_folder() -> Path:
    """The folder of this host for snapshots, which nobody else can read.

    Raises:
        UserError: there is none, or others can read it.
    """
    given = os.environ.get(SNAPSHOTS, "")
    if not given:
        raise UserError(
            "weft.Checkpoints: memory_every needs a folder in memory that outlives the ranks: start the script with "
            f"weft run on Linux, or give {SNAPSHOTS} a folder of a memory file system, as in /dev/shm, that you take "
            "away after the run; or leave memory_every out"
        )
    found = make_private(Path(given), f"give {SNAPSHOTS} another folder")
    if found.stat().st_mode & 0o077:
        raise UserError(f"others may read {found}, which gets parameters: run `chmod 700 {found}`")
    return found


def host_name(folder: Path) -> str:
    """The name that is equal for processes that see one folder of snapshots, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    there = folder.stat()
    return (
        f"{boot.read_text().strip() if boot.exists() else os.uname()} {there.st_dev} {there.st_ino}"
    )


def free_bytes(folder: Path) -> int:
    """Bytes that files in a folder of a memory file system may still take: its own room, and the host's memory."""
    there = os.statvfs(folder)
    found = there.f_bavail * there.f_frsize
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found = min(found, int(value.split()[0]) * 1024)
    return found


def folder_of(host: Path, checkpoints: Path) -> Path:
    """The folder of the snapshots that belong to the checkpoints of a folder."""
    return host / hashlib.sha256(str(checkpoints).encode()).hexdigest()[:16]


def part_folder(folder: Path, start: int, turn: int, process: int) -> Path:
    """The folder of what a process saves."""
    return folder / f"{_START}{start:05d}" / str(turn) / f"rank-{process:05d}"


def starts(folder: Path) -> list[int]:
    """The numbers of the starts that have left something."""
    names = (each.name.removeprefix(_START) for each in folder.glob(f"{_START}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def held_parts(folder: Path) -> list[HeldPart]:
    """The parts that lie on this host, of all starts, whose files are there."""
    found = []
    for start in starts(folder):
        for place in sorted((folder / f"{_START}{start:05d}").glob("*/rank-*")):
            for name in (RECORD, UNSURE):
                part = _held(place, start, name)
                if part is not None:
                    found.append(part)
                    break
    return found


def _held(place: Path, start: int, name: str) -> HeldPart | None:
    try:
        record = json.loads((place / name).read_text())
        fixed, now = record["fixed"], record["now"]
        files = {str(file): int(size) for file, size in {**fixed["files"], **now["files"]}.items()}
        if any((place / file).stat().st_size != size for file, size in files.items()):
            return None
        numbers = int(now["step"]), int(fixed["process"]), int(fixed["processes"])
        return HeldPart(start, int(place.parent.name), *numbers, name == RECORD, files)
    except UNREADABLE:
        return None  # it was being written


def discount(places: Iterable[Path]) -> None:
    """Let parts count no more, as they are to be written anew."""
    for place in places:
        for name in (RECORD, UNSURE):
            (place / name).unlink(missing_ok=True)


def take_away(folder: Path, but: tuple[int, int] | None, before: int) -> None:
    """Take away what earlier starts have left.

    Args:
        but: start and turn of the generation that stays; None for none.
        before: the start that has begun.
    """
    for start in starts(folder):
        if start < before:
            place = folder / f"{_START}{start:05d}"
            if but is None or start != but[0]:
                shutil.rmtree(place, ignore_errors=True)
            else:
                for turn in set(range(TURNS)) - {but[1]}:
                    shutil.rmtree(place / str(turn), ignore_errors=True)
