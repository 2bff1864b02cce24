"""Tracebacks of weft's errors as users read them: their own lines, without those of weft and torch in between."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from weft.errors import InternalError, UserError, WeftError
from weft.files import in_library, standard

P = ParamSpec("P")
T = TypeVar("T")


def shortened(call: Callable[P, T]) -> Callable[P, T]:
    """A public call whose errors show the user's lines alone; `WEFT_TRACEBACK=full` shows all."""

    @wraps(call)
    def public(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except InternalError:
            raise
        except WeftError as error:
            if os.environ.get("WEFT_TRACEBACK") == "full":
                raise
            _shorten(error)
            raise error  # WEFT_TRACEBACK=full shows all lines

    return public


def _shorten(error: BaseException | None) -> None:
    """Take lines of weft, torch and Python out of an error, and those of its causes that only these have raised."""
    while error is not None:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        while isinstance(error, UserError) and cause is not None and not _raised_by_user(cause):
            cause = cause.__cause__ or cause.__context__
        error.__cause__, error.__traceback__ = cause, _of_user(error.__traceback__)
        error = cause


def _raised_by_user(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not _hidden(trace)


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest = _of_user(trace.tb_next)
    if _hidden(trace):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _hidden(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return in_library(file) or standard(file)
