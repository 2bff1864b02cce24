"""Checks of Python that only raise, `if (x < 0).any(): raise ...` and `assert ...`, as checks in the graph.

A truth test of a tensor reads a value, which does not exist while a step is captured. Where one outcome
does nothing but raise, capture follows the other, and the graph checks in every step that it is the
right one: `weft.required`. All other truth tests are refused, as no branch is ever guessed; so are those
whose exception the program would catch.
"""

from __future__ import annotations

import ast
import dis
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, TypeAlias, final

import torch

from weft.capture.fx.advice import hands_on
from weft.capture.python.rewriting.catches import is_caught, kind_raised
from weft.files import PACKAGE

aten = torch.ops.aten
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
# What stands between a truth test and the op that reads the value.
_BETWEEN = (
    PACKAGE + os.sep,
    *(os.path.join(_TORCH, name) for name in ("_ops.py", "_compile.py", "_subclasses", "_dynamo")),
    *(os.path.join(_TORCH, name) for name in ("fx", os.path.join("utils", "_"))),
)
_TESTS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")  # beginnings of instructions

_READ = str(aten._local_scalar_dense.default)

# First line, last line, first column, last column.
_Place: TypeAlias = tuple[int | None, int | None, int | None, int | None]


@final
@dataclass(frozen=True)
class Check:
    """A truth test that may have one outcome only: which, and in words what happens else."""

    outcome: bool
    text: str


def _read_value(self: torch.Tensor) -> Any:
    """`_local_scalar_dense` of a truth test that is a check: its outcome, and a check in the graph."""
    check = _check_at(_reader())
    if check is None or self.numel() != 1:
        return NotImplemented
    true = self.reshape(()) != 0
    aten._assert_async.msg(true if check.outcome else true.logical_not(), check.text)
    return check.outcome


def is_check(op: str) -> bool:
    """True where `op`, which runs, is the truth test of a check, which stands in the graph."""
    return op == _READ and _check_at(_reader()) is not None


def _reader() -> FrameType | None:
    """The frame whose instruction reads the value."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (frame.f_code.co_filename.startswith(_BETWEEN) or hands_on(frame)):
        frame = frame.f_back
    return frame


def _check_at(frame: FrameType | None) -> Check | None:
    """The check that a frame is at; None where it is at anything else, or where Python does not tell (3.10)."""
    if frame is None or sys.version_info < (3, 11):
        return None
    code = frame.f_code
    place = _tested(code, frame.f_lasti)
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    found = _checks(source).get(place) if place else None
    if found is None:
        return None
    outcome, statement = found
    if is_caught(frame, kind_raised(frame, statement), _BETWEEN):
        return None
    text = _text(source, statement)
    if code.co_filename.startswith(_TORCH):
        text += f" ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
    return Check(outcome, text)


def _tested(code: CodeType, at: int) -> _Place | None:
    """The place of the expression whose truth the instruction `at` tests: what the one before it computes."""
    before = None
    for step in dis.get_instructions(code):
        if step.offset == at:
            return before if step.opname.startswith(_TESTS) else None
        if step.opname != "EXTENDED_ARG":
            before = getattr(step, "positions", None)  # 3.10 has none
    return None


@lru_cache(maxsize=64)
def _checks(source: str) -> dict[_Place, tuple[bool, ast.stmt]]:
    """The truth tests of a file that are checks, by their places: the only outcome, and what raises else."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    return {
        (part.lineno, part.end_lineno, part.col_offset, part.end_col_offset): (outcome, statement)
        for node in ast.walk(tree)
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
    """True where these statements, once begun, end by raising."""
    *before, last = body
    plain = (ast.Assign, ast.AnnAssign, ast.Expr)
    # A generator that yields before it raises may never go on.
    waits = (ast.Yield, ast.YieldFrom, ast.Await)
    return (
        isinstance(last, ast.Raise)
        and all(isinstance(one, plain) for one in before)
        and not any(isinstance(node, waits) for one in body for node in ast.walk(one))
    )


def _parts(test: ast.expr, outcome: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a test that can have one outcome only, each with it: Python tests them one by one.

    All comparisons of a chain, `0 < x < 1`, have the place of the chain. Where it has to be true, so has
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


def _text(source: str, node: ast.stmt) -> str:
    """A statement in one line, shortened."""
    found = " ".join((ast.get_source_segment(source, node) or "").split())
    return found if len(found) <= 160 else found[:160].rsplit(" ", 1)[0] + " …"


TABLE: dict[str, Callable[..., Any]] = {"_local_scalar_dense.default": _read_value}
