"""Names of the variables by which `weft run` tells its ranks how to meet, and what they say.

No other user of the host can read the environment of a rank. This module needs no torch.
"""

from __future__ import annotations

import math
import os
import secrets

from weft.errors import UserError, wrong

# Holds the process id of the launcher.
LAUNCHER = "WEFT_LAUNCHER"
# Path of the file in which the ranks of one host meet.
MEETING = "WEFT_MEETING"
# "host:port" of the store in which the ranks of several hosts meet.
STORE = "WEFT_STORE"
# The secret of the run: who knows it belongs to the job. Users set it for several nodes.
SECRET = "WEFT_SECRET"
# Seconds that a rank waits for another one.
TIMEOUT = "WEFT_TIMEOUT"

# How many times the ranks of this run were started before.
RESTART = "WEFT_RESTART"

# Without the variable.
TIMEOUT_SECONDS = 300.0
# Characters that a secret has at least.
_SHORTEST = 16


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_hex(32)


def given_secret() -> bytes:
    """The secret of the run; empty where there is none, as when torchrun started this process without one.

    Raises:
        UserError: it is too short to be one.
    """
    text = os.environ.get(SECRET, "")
    if text and len(text) < _SHORTEST:
        raise UserError(
            f"{SECRET} has {len(text)} characters; give it {_SHORTEST} or more that nobody can guess, the same on all "
            "nodes, such as `openssl rand -hex 32` prints"
        )
    return text.encode()


def started() -> int:
    """The number of times that the ranks of this run were started before."""
    return int(os.environ.get(RESTART) or 0)


def timeout_seconds() -> float:
    """Seconds that a rank waits for another one: `WEFT_TIMEOUT`, which `weft run --timeout` sets.

    Raises:
        UserError: it is no number above 0.
    """
    text = os.environ.get(TIMEOUT, "")
    try:
        found = float(text or TIMEOUT_SECONDS)
    except ValueError:
        found = 0.0
    if not (found > 0 and math.isfinite(found)):
        raise wrong(TIMEOUT, "a number of seconds above 0", text)
    return found
