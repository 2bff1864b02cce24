"""The settings of glibc's allocator, the same for every system of a comparison.

weft has a process keep what it frees (`weft.runtime.memory.heap`): a step then touches no fresh pages.
Any program could ask for that, so a comparison that gives it to weft alone would measure it and call it weft.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from benchmarks.crew import Enter
from weft.runtime.memory.heap import VARIABLE, keep_freed_memory

Malloc: TypeAlias = Literal["kept", "default"]
MALLOCS: tuple[Malloc, ...] = get_args(Malloc)


def with_malloc(malloc: Malloc, enter: Enter) -> Enter:
    """What each rank of any system does first: what `enter` does, then the allocator is set up.

    Args:
        malloc: "kept" sets it up as weft does, in the processes of peers and limits too; "default" leaves it as the
            process has it, in weft's processes too.
        enter: what a rank does besides.
    """

    def both(rank: int) -> Mapping[str, str]:
        environment = enter(rank)
        if malloc == "default":
            return {**environment, VARIABLE: "system"}
        set_up()
        return environment

    return both


def set_up() -> None:
    """Have this process keep what it frees.

    Raises:
        RuntimeError: the allocator is not glibc's, or the environment sets it up otherwise.
    """
    if not keep_freed_memory():
        names = sorted(name for name in os.environ if "MALLOC" in name or "TUNABLES" in name)
        raise RuntimeError(
            "the allocator cannot be set up as weft does: it is not glibc's, or the environment says otherwise "
            f"({', '.join(names) or 'nothing there'}); use --malloc default"
        )
