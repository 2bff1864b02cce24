"""Memory that a step frees stays with the process, for the next step.

By default glibc takes large tensors from the system one by one and gives them back when they are
freed, and each thread has an arena of its own: a step then touches thousands of fresh pages, which
the kernel has to map and clear. A step needs the same memory again and again, so keeping what was
used most costs nothing: the peak is the same.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache

from weft.errors import UserError

# "kept" (the default), or "system" to leave the allocator as it is.
VARIABLE = "WEFT_MALLOC"
_CHOICES = ("kept", "system")
# Parameters of mallopt(3): never give back the top of the heap; take all below 1 GiB from the heap;
# one heap for all threads, so that what one frees serves the others.
_SETTINGS = ((-1, -1), (-3, 2**30), (-8, 1))


def is_free_to_choose(environment: Mapping[str, str]) -> bool:
    """True where the user has not set glibc's allocator up, or told weft to leave it alone.

    Raises:
        UserError: the variable holds something else.
    """
    found = environment.get(VARIABLE) or _CHOICES[0]
    if found not in _CHOICES:
        raise UserError(f"{VARIABLE} takes {' or '.join(_CHOICES)}, found {found!r}")
    own = any(name.startswith("MALLOC_") for name in environment)
    tuned = "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return not own and not tuned and found != "system"


@cache
def keep_freed_memory() -> bool:
    """Have the process keep what it frees, once; threads that have allocated before keep their arenas.

    Returns:
        Whether it does: False with another C library, and where the user chose otherwise.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    done = [mallopt(name, value) for name, value in _SETTINGS]
    return all(done)


def give_back() -> None:
    """Give what is free now to the system: what stays is what a program that was just made holds.

    Nothing happens with another C library, and where the user chose otherwise.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's allocator; None where there is none, or it is not weft's to set up."""
    if sys.platform != "linux" or not is_free_to_choose(os.environ):
        return None
    return getattr(ctypes.CDLL(None), name, None)
