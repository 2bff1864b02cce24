"""Names of a package that are looked up when they are first read (PEP 562): importing the package imports no other."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


def looked_up(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: imports the home of a name when it is first read, and caches its value.

    Args:
        package: `__name__` of the package.
        homes: for each name, the module that defines it under the same name.
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with interrupts_later(), _nothing_drawn():
            home = import_module(homes[name])
        found = getattr(home, name)
        vars(sys.modules[package])[name] = found
        return found

    return look_up


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay a keyboard interrupt to the end of the block, because one during an import leaves half-imported modules.

    Importing torch takes seconds, and a half-imported torch raises in every later import of the process. If SIGINT
    has another handler than Python's own, and in other threads than the main one, nothing is changed.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Let Python's generator, which the user may have seeded, continue where it was.

    Imports of libraries draw from it.
    """
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


def keep_names(package: str, homes: Mapping[str, str]) -> None:
    """Bind names of `homes` that are also sub-packages to the objects that their homes define.

    The import system binds a sub-package to its name in the package; `weft.tensor` is a function.
    """

    def bind(self: ModuleType, name: str, value: Any) -> None:
        if not (name in homes and isinstance(value, ModuleType)):
            ModuleType.__setattr__(self, name, value)

    sys.modules[package].__class__ = type("_Package", (ModuleType,), {"__setattr__": bind})
