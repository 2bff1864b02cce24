"""Where weft keeps on disk what is costly to find out again: compiled kernels and what was measured.

What is compiled is code, run as it stands there: weft makes the folder for its user alone, and runs
nothing out of a folder that others may write to.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """The folder `WEFT_CACHE`, or `weft` in the user's folder for caches; it may be deleted at any time."""
    if chosen := os.environ.get("WEFT_CACHE"):
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "weft"


def read_cached(path: Path) -> Any:
    """The content of a JSON file, or None when there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
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
    """Write a file whole: readers see all of it or nothing."""
    make_folder(path.parent)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, and what is missing above it, for this user alone."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def is_private(path: Path) -> bool:
    """Whether a file and its folder belong to this user, and nobody else may write there."""
    if not hasattr(os, "getuid"):
        return True
    found = [one.stat() for one in (path, path.parent)]
    return all(one.st_uid == os.getuid() and not one.st_mode & 0o022 for one in found)
