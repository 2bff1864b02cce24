"""Paths of checkpoints, and of the hidden folders beside them."""

from __future__ import annotations

import re
from pathlib import Path

from weft.errors import UserError

# Ends of hidden folders: one that is being written, and one that another takes the place of.
PARTIAL, REPLACED = ".partial", ".replaced"


def checkpoint_path(path: object) -> Path:
    """A path that a user gave for a checkpoint, or a folder of checkpoints, from the root.

    Raises:
        UserError: it is none, or the system takes no such name.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"a checkpoint is a folder; give its path as text, found {path!r}")
    if "\0" in str(path) or not str(path).isprintable():
        raise UserError(f"a path of a checkpoint takes printable characters, found {str(path)!r}")
    found = Path(path).expanduser().absolute()
    try:
        found.exists()
    except OSError as error:
        raise UserError(
            f"a checkpoint cannot be at {found}: {error.strerror}; give another path"
        ) from None
    return found


def hidden_beside(path: Path, suffix: str) -> list[Path]:
    """The hidden folders of one checkpoint, of no other whose name only begins alike, in order.

    Args:
        path: of the checkpoint.
        suffix: `PARTIAL` or `REPLACED`.
    """
    name = re.compile(rf"{re.escape(f'.{path.name}.')}[^.]+{re.escape(suffix)}")
    folder = path.parent
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in found if name.fullmatch(each.name))
