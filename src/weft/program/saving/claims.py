"""Claims of programs on folders: two that are open, and save to one, would replace each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from weft.errors import UserError


class Claimant(Protocol):
    """A program that saves."""

    @property
    def is_open(self) -> bool:
        """True until it is closed."""


_claims: WeakValueDictionary[Path, Claimant] = WeakValueDictionary()


def claim(folder: Path, program: Claimant) -> None:
    """Note that a program saves to a folder of checkpoints, or takes the snapshots that belong to it.

    Raises:
        UserError: another open program does.
    """
    other = _claims.get(folder)
    if other is not None and other is not program and other.is_open:
        raise UserError(
            f"another open program saves to {folder}, and each would take the checkpoints of the other for its own; "
            "give each program a folder, or close the other one before"
        )
    _claims[folder] = program
