"""Source files told apart: weft's, torch's, Python's, those of installed packages, and the user's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec

PACKAGE = os.path.dirname(os.path.abspath(__file__))

_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
# torch is found without being imported.
_TORCH = find_spec("torch")
_FOLDERS = (PACKAGE, *((_TORCH.submodule_search_locations if _TORCH else None) or ()))
_LIBRARIES = tuple(os.path.abspath(folder) + os.sep for folder in _FOLDERS)


@cache
def in_library(file: str) -> bool:
    """True if a source file belongs to torch or weft, not to the user."""
    return file.startswith(_LIBRARIES)


def installed(file: str) -> bool:
    """True if a source file belongs to a package that pip installed, whoever wrote it."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))


@cache
def standard(file: str) -> bool:
    """True if a source file belongs to Python's own library."""
    return file.startswith((*_STANDARD, "<frozen ")) and not installed(file)


@cache
def users_file(file: str) -> bool:
    """True for a source file of the user's own: neither torch's nor weft's, nor installed, nor Python's own library."""
    return not (in_library(file) or installed(file) or standard(file))


@cache
def users_module(name: str) -> bool:
    """True if the user's own code has made a module of Python, given by name."""
    if name == "__main__":
        return True
    own = sys.modules.get(name)
    file = getattr(own, "__file__", None)
    if file is None:
        # A module without a file is built in, or was made by the user (a notebook, `types.ModuleType`).
        return name.partition(".")[0] not in sys.stdlib_module_names
    return users_file(file)


def user_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither weft's nor torch's nor Python's own."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        in_library(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_STANDARD[0])
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
