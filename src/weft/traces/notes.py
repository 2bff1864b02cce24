"""Texts about layers in few lines: those that differ only in the number of a layer stand once."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def stars(name: str) -> str:
    """`blocks.3.fc` as `blocks.*.fc`, so that repeated blocks fall together; files relative to here."""
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", near(name))


def near(text: str) -> str:
    """A text with files relative to here."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def joined_notes(notes: Iterable[str]) -> list[str]:
    """Notes with * in place of the numbers of layers, each once, with how often it stood there."""
    found = Counter(map(stars, notes))
    return [note if times == 1 else f"{note} (×{times})" for note, times in found.items()]
