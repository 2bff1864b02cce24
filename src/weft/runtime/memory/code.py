"""Code of libraries that compiling ran and steps do not: its pages leave the process.

Tracing, planning and a first step run much code of torch, Python and numpy that later steps do not. Its pages are
mapped from the libraries' files and count as resident. Nobody has written to them, so they need not stay: the process
lets go of all, and what runs again is mapped again from the page cache, some hundred faults in the next step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from weft.runtime.memory.allocator import is_free_to_choose

_SMAPS = Path("/proc/self/smaps")
# Of madvise(2): the pages of a mapping go; those of a file come back when they are touched.
_DONT_NEED = 4


@final
@dataclass(frozen=True)
class MappedPart:
    """A part of the address space, as proc(5) shows it.

    Attributes:
        start, end: addresses.
        permissions: such as "r-xp".
        path: of the file; "" for none.
        resident: bytes of it that are resident.
        own: of these, what is this process's alone, as it was written to.
    """

    start: int
    end: int
    permissions: str
    path: str
    resident: int = 0
    own: int = 0


@cache
def let_go_of_code() -> int:
    """Let go of the pages of libraries' code and constants, once in a process.

    Nothing happens on other systems than Linux, where the kernel does not show what is mapped, or where memory is left
    to the user (`WEFT_MALLOC`).

    Returns:
        Their bytes.
    """
    if sys.platform != "linux" or not is_free_to_choose(os.environ):
        return 0
    try:
        with _SMAPS.open() as lines:
            there = clean_code(mappings(lines))
    except OSError:
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found = 0
    for each in there:
        if advise(each.start, each.end - each.start, _DONT_NEED) == 0:
            found += each.resident
    return found


def clean_code(every: Iterable[MappedPart]) -> list[MappedPart]:
    """The parts of libraries that nobody can write to, and in which every page is the file's.

    A debugger's breakpoint makes a page that is not. A file is a library where a part of it is mapped to be run: a
    user's data never is.
    """
    there = list(every)
    libraries = {
        each.path for each in there if each.path.startswith("/") and "x" in each.permissions
    }
    return [
        each
        for each in there
        if each.path in libraries
        and each.permissions in ("r-xp", "r--p")
        and each.resident
        and not each.own
    ]


def mappings(lines: Iterable[str]) -> Iterator[MappedPart]:
    """The parts that the lines of `/proc/<pid>/smaps` tell of."""
    head: list[str] = []
    sizes: dict[str, int] = {}
    for line in lines:
        fields = line.strip().split(maxsplit=5)
        if not fields[0].endswith(":"):
            if head:
                yield _mapping(head, sizes)
            head, sizes = fields, {}
        elif fields[-1] == "kB":
            sizes[fields[0]] = int(fields[1]) * 1024
    if head:
        yield _mapping(head, sizes)


def _mapping(head: list[str], sizes: dict[str, int]) -> MappedPart:
    start, end = (int(each, 16) for each in head[0].split("-"))
    path = head[5] if len(head) > 5 else ""
    return MappedPart(start, end, head[1], path, sizes.get("Rss:", 0), sizes.get("Anonymous:", 0))
