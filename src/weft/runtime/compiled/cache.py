"""The folder where weft keeps results that are costly to find out again: compiled kernels and measurements.

Compiled kernels are code that is run from there: its folders are this user's alone, which is checked
whenever they are used, and what others may write to is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import UNREADABLE, UserError
from weft.folders import FOLDER, chosen_folder, default_folder
from weft.private import close_private, is_private, make_private

_INSTEAD = f"set {FOLDER} to a folder of your own, where nobody else may write"


def cache_folder(name: str) -> Path:
    """A folder of the cache, made and checked; it may be deleted at any time.

    The cache is the folder `WEFT_CACHE`, or `weft` in the user's folder for caches. Where others may
    write to the latter, it is a folder for this user in the system's one for temporary files, and a
    warning says so.

    Raises:
        UserError: others may write to it; names the folder and what would work.
    """
    folder = make_private(_root() / name, _INSTEAD)
    _close_once(folder)
    return folder


# What is closed stays so: nobody else can reach what lies there.
@cache
def _close_once(folder: Path) -> None:
    close_private(folder, _INSTEAD)


def _root() -> Path:
    chosen = chosen_folder()
    if chosen is not None:
        return make_private(chosen, _INSTEAD)
    try:
        return make_private(default_folder(), _INSTEAD)
    except UserError as error:
        user = os.geteuid() if hasattr(os, "geteuid") else ""
        spare = make_private(Path(tempfile.gettempdir()) / f"weft-{user}", _INSTEAD)
        warnings.warn(f"{error}; compiled code is kept in {spare} until then", stacklevel=3)
        return spare


def read_cached(path: Path) -> Any:
    """The content of a JSON file, or None when there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except UNREADABLE:
        return None


def write_cached(path: Path, content: Any) -> None:
    """Write a JSON file, as `write_text`."""
    write_text(path, json.dumps(content))


def read_code(path: Path) -> str | None:
    """The text of a file; None when there is none, or when another user may have written it."""
    try:
        return path.read_text() if is_private(path) else None
    except (OSError, ValueError):
        return None


def write_text(path: Path, text: str) -> None:
    """Write a file for this user alone, whole: readers see all of it or nothing."""
    part = path.with_suffix(f".{os.getpid()}")
    with open(part, "w", opener=_open_private) as file:
        file.write(text)
    part.replace(path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
