"""The line of a page that says what it was made from: command, day, versions, and a hash of the sources' contents.

A hash of contents, not a commit: it is the same before and after a merge, and on any branch that has these files.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import final

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".yaml", ".json")
_LINE = re.compile(
    r"^Made by `(?P<command>[^`]+)` on (?P<day>[\d-]+), torch (?P<torch>[^,]+), Python (?P<python>[^,]+), "
    r"from (?P<sources>.+) with content (?P<digest>[0-9a-f]{12})\.$",
    re.MULTILINE,
)


@final
@dataclass(frozen=True)
class Stamp:
    """What a page, or a section of it, was made from.

    Attributes:
        command: that made it.
        day: when.
        torch: version.
        python: version.
        sources: files and folders of the tree that decide what the command finds.
        digest: of their contents.
    """

    command: str
    day: date
    torch: str
    python: str
    sources: tuple[str, ...]
    digest: str

    def __str__(self) -> str:
        sources = ", ".join(f"`{source}`" for source in self.sources)
        return (
            f"Made by `{self.command}` on {self.day.isoformat()}, torch {self.torch}, Python {self.python}, "
            f"from {sources} with content {self.digest}."
        )


def stamp_now(command: str, sources: Sequence[str], root: Path = ROOT) -> Stamp:
    """The stamp of what a command makes of the tree as it is."""
    torch = version("torch").partition("+")[0]
    found = digest(contents(root, sources))
    python = platform.python_version()
    return Stamp(command, date.today(), torch, python, tuple(sources), found)


def stamps_of(page: str) -> list[Stamp]:
    """The stamps of a page, in their order."""
    return [
        Stamp(
            found["command"],
            date.fromisoformat(found["day"]),
            found["torch"],
            found["python"],
            tuple(re.findall(r"`([^`]+)`", found["sources"])),
            found["digest"],
        )
        for found in _LINE.finditer(page)
    ]


def restamped(page: str, stamp: Stamp) -> str:
    """The page with this stamp in the place of the one with its command.

    Raises:
        ValueError: when the page has none.
    """
    for found in _LINE.finditer(page):
        if found["command"] == stamp.command:
            return page[: found.start()] + str(stamp) + page[found.end() :]
    raise ValueError(
        f"no line says that `{stamp.command}` made the page; expected one like {stamp}"
    )


def contents(root: Path, sources: Sequence[str]) -> dict[str, str]:
    """The hash of each file below `sources`, by its path, as git has it.

    Raises:
        ValueError: when one of the sources is not there.
    """
    return {str(path.relative_to(root)): _blob(path) for path in sorted(_files(root, sources))}


def contents_at(commit: str, sources: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """The same at a commit."""
    command = ["git", "ls-tree", "-r", commit, "--", *sources]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    rows = (line.split(maxsplit=3) for line in told.splitlines())
    return {path: blob for _, _, blob, path in rows if path.endswith(SUFFIXES)}


def digest(files: Mapping[str, str]) -> str:
    """12 hexadecimal digits for the contents of files."""
    text = "\n".join(f"{path} {blob}" for path, blob in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _files(root: Path, sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        place = root / source
        if place.is_file():
            yield place
        elif place.is_dir():
            yield from (path for path in place.rglob("*") if path.suffix in SUFFIXES)
        else:
            raise ValueError(f"{source} is not there: name files and folders of {root}")


def _blob(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
