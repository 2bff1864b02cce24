"""Files that are never half written."""

from __future__ import annotations

import os
from pathlib import Path

from weft.errors import UserError


def write_atomically(path: str | Path, text: str, what: str) -> None:
    """Write a temporary file beside `path`, then rename it to `path`.

    Args:
        path: of the file; a pipe or other special file is written directly.
        text: the new contents, as UTF-8.
        what: errors call it.

    Raises:
        UserError: it cannot be written.
    """
    place = Path(path)
    beside = place if _is_other(place) else place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        if beside != place:
            beside.replace(place)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if beside != place and isinstance(error, OSError):
            beside.unlink(missing_ok=True)
        raise UserError(cannot_write(place, what, error)) from None


def write_making_folder(path: str | Path, text: str, what: str) -> None:
    """Like `write_atomically`, but create missing folders.

    Raises:
        UserError: it cannot be written, or its folder not be made.
    """
    make_folder_of(path, what)
    write_atomically(path, text, what)


def make_folder_of(path: str | Path, what: str) -> None:
    """Make the folder of a file, where it is missing.

    Raises:
        UserError: it cannot be made.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # as above
        raise UserError(cannot_write(Path(path), what, error)) from None


def check_writable(path: str | Path, what: str) -> None:
    """Check that a file can be written, before computing its contents.

    Raises:
        UserError: it cannot.
    """
    place = Path(path)
    try:
        if place.exists() or place.is_symlink():
            with place.open("ab"):
                return
        with place.open("xb"):
            pass
        place.unlink()
    except (OSError, ValueError) as error:  # as above
        raise UserError(cannot_write(place, what, error)) from None


def cannot_write(path: Path, what: str, error: Exception) -> str:
    """The message that a file cannot be written."""
    why = getattr(error, "strerror", None) or error
    return f"cannot write {what} {path}: {why}; give a path that can be written"


def _is_other(place: Path) -> bool:
    return place.is_symlink() or (place.exists() and not place.is_file())
