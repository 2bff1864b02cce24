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

from weft.cli.failure import write_note
from weft.runtime.world.meeting import meet_privately
from weft.runtime.world.variables import LAUNCHER

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run `sys.argv[1]` with the arguments behind it as the program of this process."""
    code = [0]
    # The first one to be registered is the last one to run: threads were waited for, and all others
    # have said good-bye. What waits inside torch when the interpreter is taken down would abort.
    atexit.register(lambda: _leave(code[0]))
    faulthandler.enable()
    _end_with_launcher()
    meet_privately()
    del sys.argv[0]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except Exception as error:
        write_note(error, script)
        _leave(1)


def _end_with_launcher() -> None:
    if sys.platform != "linux":  # there a rank outlives a launcher that was killed
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.get(LAUNCHER, str(os.getppid())):
        os._exit(1)  # it was killed before it could be heard of


def _leave(code: int) -> None:
    """End at once: a queue's thread or a process group that waits for a peer must not hold this rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
