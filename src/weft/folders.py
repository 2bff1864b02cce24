"""The folder where weft keeps what is costly to find out again: compiled kernels and measurements."""

from __future__ import annotations

import os
from pathlib import Path

# Names the folder, where it is set.
FOLDER = "WEFT_CACHE"


def chosen_folder() -> Path | None:
    """The folder that the variable `WEFT_CACHE` names; None where it is not set."""
    chosen = os.environ.get(FOLDER)
    return Path(chosen) if chosen else None


def default_folder() -> Path:
    """The folder `weft` in the user's folder for caches."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "weft"
