"""The reason why a run failed: each rank that raises writes a note, and the launcher finds the one that came first.

When one rank fails, its peers soon fail too, because it no longer answers. The agent only sees exit
codes, in any order; the notes carry the time and the traceback.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import final

from weft.errors import RankFailure
from weft.runtime.world.launch import Exit

# Folder of the notes, set by the launcher for its ranks.
NOTES = "WEFT_FAILURE_NOTES"

# A process ends with these only by another's will or its own crash, never because a peer is gone.
CRASHES = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})


@final
@dataclass(frozen=True)
class Note:
    """The note that a rank wrote when it raised.

    Attributes:
        rank: the global rank.
        nanoseconds: when, on the clock of its node.
        title: the last line of the traceback: type and message.
        text: the whole traceback, without the frames of the launcher.
        echo: whether it says itself that another rank failed before.
    """

    rank: int
    nanoseconds: int
    title: str
    text: str
    echo: bool


def write_note(error: BaseException, script: str) -> None:
    """Write down why this rank fails, for the launcher to show. Prints it instead where there is no launcher."""
    text = format_error(error, script)
    folder = os.environ.get(NOTES)
    if folder is None:
        os.write(2, text.encode())
        return
    rank = int(os.environ["RANK"])
    title = traceback.format_exception_only(error)[-1].strip()
    note = Note(rank, time.time_ns(), title, text, isinstance(error, RankFailure))
    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(note)))


def format_error(error: BaseException, script: str) -> str:
    """The traceback of `error` from the first frame of `script` on."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error))
    trace = _from_script(error.__traceback__, script)
    return "".join(traceback.format_exception(type(error), error, trace))


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    step = trace
    while step is not None:
        if step.tb_frame.f_code.co_filename == script:
            return step
        step = step.tb_next
    return trace


def read_notes(folder: Path) -> tuple[Note, ...]:
    """All notes in `folder`, by rank."""
    notes = (Note(**json.loads(path.read_text())) for path in folder.glob("*.json"))
    return tuple(sorted(notes, key=lambda note: note.rank))


def describe(exits: Sequence[Exit], notes: Sequence[Note]) -> str:
    """One paragraph on the rank that failed first: who, how, and its traceback if it left one."""
    noted = {note.rank for note in notes}
    silent = [end for end in exits if end.rank not in noted]
    crashed = [end for end in silent if _signal_name(end.code) in CRASHES]
    if crashed:
        return _describe_exit(crashed[0])
    if notes:
        first = min(notes, key=lambda note: (note.echo, note.nanoseconds))
        return f"rank {first.rank} failed: {first.title}\n\n{first.text.rstrip()}"
    return _describe_exit(silent[0])


def _describe_exit(end: Exit) -> str:
    if end.code >= 0:
        return f"rank {end.rank} (process {end.pid}) ended with exit code {end.code}"
    name = _signal_name(end.code)
    hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"rank {end.rank} (process {end.pid}) was ended by signal {-end.code} ({name}){hint}"


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "unknown"
