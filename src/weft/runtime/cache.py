"""Where weft keeps on disk what is costly to find out again: compiled kernels and what was measured."""

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
    """Write a JSON file whole: readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content))
    part.replace(path)
