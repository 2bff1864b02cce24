"""The errors that weft raises on purpose, grouped by who must act.

`UserError` and its subclasses mean that the program, strategy or input asks for something that cannot work; the
message says where, what was expected, what was given and what would work. `RankFailure` means that the outside failed
(a rank died, a peer did not answer). `InternalError` means a bug in weft.
"""

from __future__ import annotations

import reprlib
import sys
from typing import TypeGuard


class WeftError(Exception):
    """Root of every error that weft raises on purpose."""


class UserError(WeftError):
    """Something in the user's program, strategy or input cannot work."""


class CaptureError(UserError):
    """The training step cannot be captured as one graph."""


class LayoutError(UserError):
    """A placement or an SBP does not fit the tensor, the op or the world."""


class RuleError(UserError):
    """An op has no sharding rule, or no signature of it fits the fixed layouts."""


class StrategyError(UserError):
    """A strategy names something that does not exist or contradicts itself."""


class BatchError(UserError):
    """A batch differs from the example that the program was compiled for."""


class DamagedCheckpoint(UserError):
    """A checkpoint's files are missing, or not those that were written."""


class VerificationError(UserError):
    """A compiled step and a plain eager step of the same code give different results."""


class RankFailure(WeftError):
    """A rank raised, died or did not answer in time."""


class NoAnswer(RankFailure):
    """Another rank has ended early, or did not answer in time; this one says so, and is not the cause."""


class InternalError(WeftError):
    """An invariant of weft does not hold: a bug in weft, not in the user's program."""


# Errors of reading a damaged file, or one of another kind: readers catch these, and say so by a `UserError` that
# names it.
UNREADABLE: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def shown(value: object) -> str:
    """A value in short, for messages; its type, where it has no text of its own, or none that can be made."""
    kind = f"a value of type {type(value).__name__}"
    try:
        return kind if type(value).__repr__ is object.__repr__ else reprlib.repr(value)
    except Exception:  # a repr of the user's, or a number of thousands of digits
        return kind


def wrong(
    what: str, expected: str, got: object, kind: type[UserError] = UserError, remedy: str = ""
) -> UserError:
    """The error on an argument, or on an entry of a file.

    Args:
        what: its name: "weft.fit: steps", "machine.yaml: nodes[0]: count".
        expected: the expected value: "a whole number from 1".
        got: what was given.
        kind: of error.
        remedy: another remedy.
    """
    rest = f"; {remedy}" if remedy else ""
    return kind(f"{what} must be {expected}, got {shown(got)}{rest}")


def check(
    where: str, *rows: tuple[bool, str, str, object], kind: type[UserError] = UserError
) -> None:
    """Check the arguments of a call.

    Args:
        where: names the call.
        *rows: of each argument whether it is right, its name, what it must be, and what was given.
        kind: of error.

    Raises:
        UserError: of this kind, where one is not right.
    """
    for holds, name, expected, got in rows:
        if not holds:
            raise wrong(f"{where}: {name}", expected, got, kind)


def is_whole(value: object, least: float = float("-inf")) -> TypeGuard[int]:
    """True for Python's whole numbers from `least` on; truth values are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, least: float = float("-inf")) -> TypeGuard[float]:
    """True for Python's finite numbers from `least` on; truth values are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return max(least, -sys.float_info.max) <= value <= sys.float_info.max
