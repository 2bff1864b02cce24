"""Errors of tracing, said in the user's words: the line, why a graph cannot hold it, and what would do."""

from __future__ import annotations

import inspect
import linecache
import operator
import traceback
from collections.abc import Callable
from typing import Any

import torch

from weft.capture.fx import Refusal
from weft.capture.locations import in_library, location_of
from weft.errors import CaptureError
from weft.ir.logical import Location

_VALUE_WORDS = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "trying to get value out of a tracing tensor",
    "GuardOnDataDependentSymNode",
)
_RANDOM = (
    "draws random numbers in a way that would differ from layout to layout; use torch.rand, randn, randint, "
    "multinomial, dropout and the like without a generator, or draw the numbers outside and pass them in the batch"
)
_RANDOM_BACKWARD = (
    "runs in the backward pass, where torch.utils.checkpoint would have to repeat the numbers of the forward; "
    "leave random ops out of recomputed parts, or take the checkpoint away"
)
_VALUE = (
    "the step would depend on the values in a tensor ({what}), but the graph is captured once, before any values "
    "exist; keep values in tensors (torch.where, masks of fixed shape), and use no .item(), bool(tensor), "
    "nonzero() or sizes that depend on data"
)


def refuse(error: Exception) -> CaptureError:
    """The error to raise in place of one that stopped the trace."""
    if isinstance(error, Refusal):
        return CaptureError(_where(error) + str(error))
    text = f"{type(error).__name__}: {error}"
    if any(word in text for word in _VALUE_WORDS):
        reason = _VALUE.format(what=_first_line(error))
    else:
        reason = f"running the loss function on tensors without data failed with {text}"
    return CaptureError(_where(error) + reason)


def refuse_op(op: Any, location: Location | None, reason: str) -> CaptureError:
    """The error for an op that must not stand in a graph."""
    where = source_line(location.file, location.line) if location else ""
    return CaptureError(f"{where}the op {op} {reason}")


def check_ops(graph: torch.fx.Graph) -> None:
    """Refuse ops of a located trace that no logical graph may hold.

    Raises:
        CaptureError: naming the user's line.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _check_random(node.target, node, location_of(node))
        elif node.op == "call_function" and node.target is not operator.getitem:
            raise refuse_op(
                node.target, location_of(node), "is no ATen op; expected plain tensor code"
            )


def _check_random(
    op: torch._ops.OpOverload, node: torch.fx.Node, location: Location | None
) -> None:
    if torch.Tag.nondeterministic_seeded in op.tags and _draws(op, node):
        raise refuse_op(op, location, _RANDOM)
    if op is torch.ops.weft.uniform.default and location and location.backward:
        raise refuse_op("for random numbers", location, _RANDOM_BACKWARD)


def _draws(op: torch._ops.OpOverload, node: torch.fx.Node) -> bool:
    """Whether a random op draws: fused attention is tagged as random, but draws nothing without dropout."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0)


def in_function(function: Callable[..., Any], error: CaptureError) -> CaptureError:
    """The same error, with the place where `function` is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return error
    return CaptureError(source_line(code.co_filename, code.co_firstlineno) + str(error))


def source_line(file: str, line: int) -> str:
    """`file:line: source` on a line of its own."""
    return f"{file}:{line}: {linecache.getline(file, line).strip()}\n  "


def _where(error: Exception) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not in_library(frame.filename):
            return source_line(frame.filename, frame.lineno or 0)
    return ""


def _first_line(error: Exception) -> str:
    func = getattr(error, "func", None)
    if isinstance(func, torch._ops.OpOverload):
        return str(func)
    return (str(error).splitlines() or [type(error).__name__])[0]
