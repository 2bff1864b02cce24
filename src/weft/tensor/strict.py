"""Strict mode: implicit boxing that moves bytes is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from weft.errors import LayoutError
from weft.tensor.divergence import user_line

_strict: ContextVar[bool] = ContextVar("weft_strict_boxing", default=False)


@contextmanager
def strict_boxing() -> Iterator[None]:
    """While this lasts, an op on global tensors whose operands would have to be moved raises LayoutError.

    `to_global` and `full` still move what they are told to.
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def check_strict(moved: int, op: str, advice: str) -> None:
    """Raise LayoutError when boxing moves bytes in strict mode."""
    if moved and _strict.get():
        raise LayoutError(
            f"{user_line()}: {op} would move {moved} bytes to bring operands together, which strict_boxing forbids: "
            f"{advice}. Box them first: x.to_global(sbp=…)"
        )
