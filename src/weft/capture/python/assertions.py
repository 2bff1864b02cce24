"""Checks of Python that only raise, `if (x < 0).any(): raise ...` and `assert ...`, as checks in the graph.

A truth test of a tensor reads a value, which does not exist while a step is captured. If one outcome
does nothing but raise, capture follows the other, and the graph checks in every step that it is the
right one: `weft.required`. All other truth tests are refused, because capture never guesses a branch; so is a
check whose exception the program would catch.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeAlias, final

import torch

from weft.capture.fx.locations import hands_on
from weft.capture.fx.private import stands_for
from weft.files import PACKAGE

aten = torch.ops.aten
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
# Ops between a truth test and the op that reads the value.
_BETWEEN = (
    PACKAGE + os.sep,
    *(os.path.join(_TORCH, name) for name in ("_ops.py", "_compile.py", "_subclasses", "_dynamo")),
    *(os.path.join(_TORCH, name) for name in ("fx", os.path.join("utils", "_"))),
)
_TESTS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")  # beginnings of instructions

_READ = str(aten._local_scalar_dense.default)

TABLE: dict[torch._ops.OpOverload, Callable[..., Any]] = {}

_CAPTURE = os.path.join(PACKAGE, "capture", "fx", "private.py")
# Loops, `next`, `hasattr` and `getattr` catch these without a statement that says so.
_SIGNALS = (StopIteration, StopAsyncIteration, GeneratorExit, AttributeError)
_TRIES = ("Try", "TryStar")  # by name: 3.10 has no TryStar
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# First line, last line, first column, last column.
_Place: TypeAlias = tuple[int | None, int | None, int | None, int | None]


@final
@dataclass(frozen=True)
class Check:
    """A truth test that may have one outcome only: which, and in words what happens else."""

    outcome: bool
    text: str


@stands_for(TABLE, "_local_scalar_dense.default")
def _read_value(self: torch.Tensor) -> Any:
    """`_local_scalar_dense` of a truth test that is a check: its outcome, and a check in the graph."""
    check = _check_at(_reader())
    if check is None or self.numel() != 1:
        return NotImplemented
    true = self.reshape(()) != 0
    aten._assert_async.msg(true if check.outcome else true.logical_not(), check.text)
    return check.outcome


def is_check(op: str) -> bool:
    """True if `op`, which runs, is the truth test of a check, which is in the graph."""
    return op == _READ and _check_at(_reader()) is not None


def _reader() -> FrameType | None:
    """The frame whose instruction reads the value."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (frame.f_code.co_filename.startswith(_BETWEEN) or hands_on(frame)):
        frame = frame.f_back
    return frame


def _check_at(frame: FrameType | None) -> Check | None:
    """The check that a frame is at; None if it is at anything else, or where Python does not tell (3.10)."""
    if frame is None or sys.version_info < (3, 11):
        return None
    code = frame.f_code
    place = _tested_expression(code, frame.f_lasti)
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    found = _checks(source).get(place) if place else None
    if found is None:
        return None
    outcome, statement = found
    if _may_be_caught(frame, statement):
        return None
    text = " ".join((ast.get_source_segment(source, statement) or "").split())
    text = text if len(text) <= 160 else text[:160].rsplit(" ", 1)[0] + " …"
    if code.co_filename.startswith(_TORCH):
        text += f" ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
    return Check(outcome, text)


def _tested_expression(code: CodeType, at: int) -> _Place | None:
    """The place of the expression whose truth the instruction `at` tests: what the one before it computes."""
    before = None
    for step in dis.get_instructions(code):
        if step.offset == at:
            return before if step.opname.startswith(_TESTS) else None
        if step.opname != "EXTENDED_ARG":
            before = getattr(step, "positions", None)  # 3.10 has none
    return None


@lru_cache(maxsize=64)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


@lru_cache(maxsize=64)
def _checks(source: str) -> dict[_Place, tuple[bool, ast.stmt]]:
    """The truth tests of a file that are checks, by their places: the only outcome, and what raises else."""
    tree = _tree(source)
    return {
        (part.lineno, part.end_lineno, part.col_offset, part.end_col_offset): (outcome, statement)
        for node in (ast.walk(tree) if tree else ())
        for test, holds, statement in _tests(node)
        for part, outcome in _parts(test, holds)
    }


def _tests(node: ast.AST) -> Iterator[tuple[ast.expr, bool, ast.stmt]]:
    """The test of a check, its only outcome, and what raises else."""
    if isinstance(node, ast.Assert):
        yield node.test, True, node
    elif isinstance(node, ast.If) and _raises(node.body):
        yield node.test, False, node.body[-1]


def _raises(body: list[ast.stmt]) -> bool:
    """True if these statements, once begun, end by raising."""
    *before, last = body
    plain = (ast.Assign, ast.AnnAssign, ast.Expr)
    # A generator that yields before it raises may never continue.
    waits = (ast.Yield, ast.YieldFrom, ast.Await)
    return (
        isinstance(last, ast.Raise)
        and all(isinstance(one, plain) for one in before)
        and not any(isinstance(node, waits) for one in body for node in ast.walk(one))
    )


def _parts(test: ast.expr, outcome: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a truth test with only one possible outcome, each with the outcome: Python tests them one by one.

    All comparisons of a chain, `0 < x < 1`, have the place of the chain. If it has to be true, so has
    each of them; where it has to be false, only the last one that is reached, which no place tells.
    """
    if isinstance(test, ast.Compare) and len(test.ops) > 1 and not outcome:
        return
    yield test, outcome
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not outcome)
    if isinstance(test, ast.BoolOp):
        # `or` is false where all parts are; `and`, once its last part is reached, where that one is.
        every = isinstance(test.op, ast.Or) != outcome
        for part in test.values if every else test.values[-1:]:
            yield from _parts(part, outcome)


# A raise that the program catches is a branch. `try` statements and contexts, and what the interpreter itself catches,
# are looked for in all frames from the one that raises up to the capture. A handler that does not end by `raise`, and a
# context of others than torch, may catch any exception.


def _may_be_caught(frame: FrameType, statement: ast.stmt) -> bool:
    """True if what a `raise` or `assert` of a frame raises may be caught by it, or by its callers in the capture."""
    raised = statement.exc if isinstance(statement, ast.Raise) else None
    named = raised.func if isinstance(raised, ast.Call) else raised
    kind: Any = AssertionError if isinstance(statement, ast.Assert) else None
    if named is not None:
        kind = _value(frame, named)
    known = isinstance(kind, type)
    if known and issubclass(kind, _SIGNALS):
        return True
    # A loop over an object without `__iter__` ends by an `IndexError`.
    ends_loop = not known or issubclass(kind, IndexError)
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename != _CAPTURE:
        if not caller.f_code.co_filename.startswith(_BETWEEN):
            around = _enclosing_statements(caller)
            if around is None or (ends_loop and caller.f_code.co_name == "__getitem__"):
                return True
            if any(_stops(each, block, caller) for each, block in around):
                return True
        caller = caller.f_back
    return False


def _enclosing_statements(frame: FrameType) -> list[tuple[ast.AST, str]] | None:
    """The statements of its function around the line of a frame, innermost first, each with the block.

    None if the function handles exceptions and has no source.
    """
    code = frame.f_code
    if not getattr(code, "co_exceptiontable", b"") or code.co_name.startswith(("<lambda", "<gen")):
        return []
    tree = _tree("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    found = [] if tree is None else list(_path(tree, frame.f_lineno))[::-1]
    if not found:
        return None
    for at, (node, _) in enumerate(found):
        if isinstance(node, _SCOPES) and node.name == code.co_name:
            return found[:at]
    return found


def _path(node: ast.AST, line: int) -> Iterator[tuple[ast.AST, str]]:
    """From a statement inwards, those around a line, each with the name of the block that the line is in."""
    for block, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else ():
            lines = _lines(child)
            if lines is not None and lines[0] <= line <= lines[1]:
                yield node, block
                yield from _path(child, line)
                return


def _lines(node: Any) -> tuple[int, int] | None:
    """The first and last line of a statement, or of a part of one that holds statements."""
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, node.body[-1].end_lineno or 0
    if isinstance(node, (ast.stmt, ast.ExceptHandler)):
        return node.lineno, node.end_lineno or node.lineno
    return None


def _stops(statement: Any, block: str, frame: FrameType) -> bool:
    """True if a statement may stop an exception from one of its blocks."""
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return not all(_of_torch(frame, each.context_expr) for each in statement.items)
    if type(statement).__name__ not in _TRIES:
        return False
    if block != "finalbody" and _leaves(statement.finalbody):
        return True
    return block == "body" and not all(
        (
            isinstance(each.body[-1], ast.Raise)
            and each.body[-1].exc is None
            and not _leaves(each.body)
        )
        for each in statement.handlers
    )


def _of_torch(frame: FrameType, context: ast.expr) -> bool:
    """True if the context of a `with` ends as torch or weft says, as `torch.no_grad()` does, or does nothing."""
    manager = _value(frame, context.func if isinstance(context, ast.Call) else context)
    kind = manager if isinstance(manager, type | FunctionType) else type(manager)
    leave = (
        kind if isinstance(kind, FunctionType) else inspect.getattr_static(kind, "__exit__", None)
    )
    own = str(getattr(leave, "__module__", "")).startswith(("torch.", "weft."))
    return own or kind is contextlib.nullcontext or frame.f_code.co_filename.startswith(_TORCH)


def _leaves(body: Iterable[ast.AST], looping: bool = False) -> bool:
    """True if statements may end by `return`, `break`, `continue` or wait in a `yield`, not by an exception."""
    for node in body:
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            return True
        if isinstance(node, (ast.Break, ast.Continue)) and not looping:
            return True
        if isinstance(node, (*_SCOPES, ast.Lambda)):
            continue
        if _leaves(ast.iter_child_nodes(node), looping or isinstance(node, _LOOPS)):
            return True
    return False


def _value(frame: FrameType, node: ast.expr) -> Any:
    """The value of a name, an attribute or a tuple of them in a frame; None if that is not seen."""
    if isinstance(node, ast.Tuple):
        return tuple(_value(frame, one) for one in node.elts)
    if isinstance(node, ast.Attribute):
        return inspect.getattr_static(_value(frame, node.value), node.attr, None)
    if not isinstance(node, ast.Name):
        return None
    scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
    return next((scope[node.id] for scope in scopes if node.id in scope), None)
