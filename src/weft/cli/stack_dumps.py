"""The place at which a rank is that does not answer: it writes its stacks when a signal asks for them.

Python's own faulthandler writes them within the signal, so a rank answers also in a call that never returns.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

from weft.files import users_file

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
    """By rank, the innermost line of the user's in its main thread, of those ranks that were asked and answered."""
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
