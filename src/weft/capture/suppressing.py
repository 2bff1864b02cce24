"""Whether a context manager may swallow the exception that leaves its `with`, by what its source says."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any


def may_swallow(manager: Any) -> bool:
    """Whether an exception may end at a context manager.

    Args:
        manager: its class, an object of it, or a function of `contextlib.contextmanager`; of anything
            else, and of what is not written in Python, nothing is known, and the answer is False.
    """
    if isinstance(manager, (FunctionType, staticmethod, classmethod)):
        return any(map(_catches_at_yield, _nodes(inspect.unwrap(manager), ast.Try)))  # type: ignore[arg-type]
    kind = manager if isinstance(manager, type) else type(manager)
    leave = inspect.getattr_static(kind, "__exit__", None)
    return isinstance(leave, FunctionType) and any(map(_gives_true, _nodes(leave, ast.Return)))


def _nodes(function: Callable[..., Any], kind: type[ast.AST]) -> Iterator[Any]:
    """The nodes of a kind in the source of a function; none where it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, kind))


def _catches_at_yield(statement: ast.Try) -> bool:
    """Whether a `try` around a `yield` has a handler that does not end by raising."""
    nodes = [node for one in statement.body for node in ast.walk(one)]
    waits = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes)
    return waits and any(not isinstance(each.body[-1], ast.Raise) for each in statement.handlers)


def _gives_true(statement: ast.Return) -> bool:
    """Whether a `return` of an `__exit__` may return what is true."""
    value = statement.value
    return value is not None and not (isinstance(value, ast.Constant) and not value.value)
