"""One rank: run the user's script as `python script.py` would, and write down why it failed if it did.

The launcher starts this module once for each rank: `python -m weft.cli.worker script.py
arguments…`.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path

from weft.cli.failure import NOTES, dump_stacks_on_signal, write_note
from weft.runtime.world.launch import LAUNCHER
from weft.runtime.world.rendezvous import private_rendezvous

PR_SET_PDEATHSIG = 1
# Python's own exit code if its output cannot be written.
_LOST_OUTPUT = 120


def main() -> None:
    """Run `sys.argv[1]` with the arguments after it as the program of this process."""
    code = [1]  # of a rank that ends before its script has ended well
    # The first one to be registered is the last one to run: threads were waited for, and all others
    # have said good-bye. A thread that waits inside torch at interpreter shutdown would abort.
    atexit.register(lambda: _leave(code[0]))
    faulthandler.enable()
    _end_with_launcher()
    if NOTES in os.environ:
        dump_stacks_on_signal(Path(os.environ[NOTES]), int(os.environ["RANK"]))
    del sys.argv[0]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        private_rendezvous()
        runpy.run_path(script, run_name="__main__")
        code[0] = 0
    except SystemExit as end:
        code[0] = _code(end)
        raise
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except BaseException as error:
        try:
            write_note(error, script)
        finally:  # whatever becomes of the note
            _leave(1)


def _code(end: SystemExit) -> int:
    """The exit code that a script asks for, as one byte; none that stands for a failure becomes 0."""
    if not isinstance(end.code, int):
        return int(end.code is not None)
    return end.code & 0xFF or int(end.code != 0)


def _end_with_launcher() -> None:
    if sys.platform != "linux":  # there a rank outlives a launcher that was killed
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.get(LAUNCHER, str(os.getppid())):
        os._exit(1)  # it was killed before it could be heard of


def _leave(code: int) -> None:
    """End at once: a queue's thread or a process group that waits for a peer must not hold this rank."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:
            code = code or _LOST_OUTPUT
    os._exit(code)


if __name__ == "__main__":
    main()
