"""The reason why a run failed: each rank that raises writes a note, and the launcher finds the first note.

When one rank fails, its peers soon fail too, because it no longer answers. Exit codes come in any order; the
notes carry the time and the traceback, and say whether another rank was waited for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, final

from weft.atomic_files import write_atomically
from weft.errors import NoAnswer, RankFailure, UserError
from weft.files import users_file
from weft.runtime.world.launch import Exit

# Folder of the notes, set by the launcher for its ranks.
NOTES = "WEFT_FAILURE_NOTES"

# A process ends with these only by another's will or its own crash, never because a peer is gone.
CRASHES = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})

# The kind of a rank's failure: its own, another one's that it waited for, or one that it was told of.
OWN, WAITED, TOLD = "own", "waited", "told"
# Words of errors that torch raises where a peer has gone: Gloo's, those of stores, then NCCL's, in whatever case.
_GONE = (
    *("closed by peer", "reset by peer", "broken pipe", "timed out waiting", "pair closure"),
    *("wait timeout", "timeout waiting for key"),
    *(
        "closed by remote peer",
        "remote process exit",
        "ncclremoteerror",
        "communicator was aborted",
    ),
)
# A rank that a signal ends is seen so many nanoseconds after it took its peers with it, at most.
_SEEN_LATE = 200_000_000


@final
@dataclass(frozen=True)
class Note:
    """The note that a rank wrote when it raised.

    Attributes:
        rank: the global rank.
        nanoseconds: when, as `time.monotonic_ns` tells, the same clock for all processes of its node.
        title: the last line of the traceback: type and message.
        text: the whole traceback, without the frames of the launcher.
        kind: "own", "waited" if another rank did not answer, "told" if another rank's failure ended it.
    """

    rank: int
    nanoseconds: int
    title: str
    text: str
    kind: str

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def write_note(error: BaseException, script: str) -> None:
    """Write down why this rank fails, for the launcher to show; print it where there is none, or no place for it."""
    now = time.monotonic_ns()
    folder = os.environ.get(NOTES)
    if folder is None:
        _print(format_error(error, script))
        return
    title = traceback.format_exception_only(error)[-1].strip()
    rank, text = int(os.environ["RANK"]), format_error(error, script)
    note = Note(rank, now, title, text, _kind(error))
    try:
        write_atomically(Path(folder, f"{note.rank}.json"), str(note), "the note")
    except UserError as cause:
        _print(f"{note.text}weft run: {cause}\n")


def _print(text: str) -> None:
    os.write(2, text.encode(errors="backslashreplace"))


def _kind(error: BaseException) -> str:
    if isinstance(error, NoAnswer):
        return WAITED
    if isinstance(error, RankFailure):
        return TOLD if error.__class__ is not RankFailure else OWN
    said = "".join(traceback.format_exception_only(error)).lower()
    gone = isinstance(error, RuntimeError) and any(words in said for words in _GONE)
    return WAITED if gone else OWN


def format_error(error: BaseException, script: str) -> str:
    """The traceback of `error` from the first frame of `script` on."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    trace = trace or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace))


def read_notes(folder: Path) -> tuple[Note, ...]:
    """All notes in `folder` that can be read, by rank."""
    found = list[Note]()
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            found.append(Note(**json.loads(path.read_text())))
    return tuple(sorted(found, key=lambda note: note.rank))


def describe(
    exits: Sequence[Exit],
    notes: Sequence[Note],
    left: Sequence[int] = (),
    places: Mapping[int, str] | None = None,
) -> str:
    """One paragraph on the rank that failed first: who, how, and its traceback if it left one.

    Args:
        exits: of all ranks of this node, in the order of time.
        notes: that they left.
        left: ranks of other nodes that ended with exit code 0.
        places: the stack traces of ranks that had to be ended, by rank, if they sent one.
    """
    own = own_failure(exits, notes)
    if own is not None:
        return own
    # Nobody failed by itself: somebody waited for a rank that had left, or that did not answer.
    first = min(notes, key=lambda note: (note.kind == TOLD, note.nanoseconds), default=None)
    blamed = absent(exits, left, places)
    if first is None or not blamed:
        return _describe_note(first) if first else _describe_exit(exits[0])
    return f"{_list_text(blamed)}.\n\n{_describe_note(first)}"


def own_failure(exits: Sequence[Exit], notes: Sequence[Note]) -> str | None:
    """The first failure that no other rank caused; None if the ranks here only waited, or were notified.

    A crash comes before what the others raise because of it, and is often seen after that: see `_SEEN_LATE`. Where
    a failure was noted before a crash, both are shown.
    """
    noted = {note.rank for note in notes}
    silent = [end for end in exits if end.code and not end.asked and end.rank not in noted]
    found = [(note.nanoseconds, _describe_note(note)) for note in notes if note.kind == OWN]
    found += [(end.nanoseconds, _describe_exit(end)) for end in silent if not _crashed(end)]
    crashes = [(end.nanoseconds, _describe_exit(end)) for end in silent if _crashed(end)]
    if not crashes or not found:
        return min(found + crashes)[1] if found or crashes else None
    (failed, failure), (seen, crash) = min(found), min(crashes)
    if seen <= failed:
        return crash
    if seen <= failed + _SEEN_LATE:
        return f"{crash}\n\n{(seen - failed) / 1e9:.1f} s before that was seen, {failure}"
    return f"{failure}\n\n{(seen - failed) / 1e9:.1f} s later, {crash}"


def absent(
    exits: Sequence[Exit], left: Sequence[int] = (), places: Mapping[int, str] | None = None
) -> list[str]:
    """Texts on those waited for in vain: ranks that had ended with exit code 0, else those that did not answer."""
    early = [_process(end) for end in exits if not end.code and not end.asked]
    early += [f"rank {rank} (on another node)" for rank in left]
    return [f"{who} ended with exit code 0 while others still waited for it" for who in early] or [
        _describe_hung(end, (places or {}).get(end.rank)) for end in exits if end.asked
    ]


def _crashed(end: Exit) -> bool:
    return _signal_name(end.code) in CRASHES


def _list_text(texts: Iterable[str]) -> str:
    """Up to three texts, and how many there are more."""
    some = list(texts)
    more = f"; and {len(some) - 3} more ranks" if len(some) > 3 else ""
    return "; ".join(some[:3]) + more


def _describe_note(note: Note) -> str:
    return f"rank {note.rank} failed: {note.title}\n\n{note.text.rstrip()}"


def _describe_hung(end: Exit, place: str | None) -> str:
    how = (
        "it was stopped by a signal (SIGSTOP)"
        if end.state
        else "it still ran, and did not wait for them" + (f"; it was at {place}" if place else "")
    )
    return f"{_process(end)} did not answer the others: {how}"


def _describe_exit(end: Exit) -> str:
    if end.code >= 0:
        return f"{_process(end)} ended with exit code {end.code}"
    name = _signal_name(end.code)
    hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"{_process(end)} was ended by signal {-end.code} ({name}){hint}"


def _process(end: Exit) -> str:
    return f"rank {end.rank} (process {end.pid})"


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "unknown"


# The place at which a rank is that does not answer: it writes its stacks when a signal asks for them.
#
# Python's own faulthandler writes them within the signal, so a rank answers also in a call that never returns.


# The signal that asks; whoever knows nothing of it is not asked. It is not one that schedulers or scripts use.
ASKS = signal.SIGQUIT

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@final
class _Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


# The file that this process writes its stacks into, open until it gets another rank or ends.
_file: list[int] = []


def dump_stacks_on_signal(folder: Path, rank: int) -> None:
    """Have this process write its stacks into `folder` as soon as `ASKS` comes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    file = os.open(Path(folder, f"{rank}.stacks"), flags, 0o600)
    os.write(file, f"{threading.main_thread().ident}\n".encode())
    faulthandler.register(ASKS, file)
    while _file:
        os.close(_file.pop())
    _file.append(file)


def read_stack_dumps(folder: Path) -> Mapping[int, str]:
    """By rank, the innermost user line in the main thread, for the ranks that answered the signal."""
    found = {path: _place(path) for path in folder.glob("*.stacks")}
    return {int(path.stem): text for path, text in found.items() if text}


def _place(path: Path) -> str:
    try:
        main, *lines = path.read_text(errors="replace").splitlines()
        frames = _frames(lines, int(main))
    except (OSError, ValueError):
        return ""
    own = [each for each in frames if users_file(each.file)]
    written = [each for each in own if not each.file.startswith("<")]  # not in a text that was run
    return str((written or own or frames)[0]) if frames else ""


def _frames(lines: Sequence[str], main: int) -> list[_Frame]:
    """The frames of the main thread, the innermost first."""
    found, here = list[_Frame](), False
    for line in lines:
        if thread := _THREAD.match(line):
            here = int(thread[1], 16) == main
        elif here and (frame := _FRAME.fullmatch(line)):
            found.append(_Frame(*frame.groups()))
    return found
