"""Errors of tracing, said in the user's words: the line, why a graph cannot hold it, and what would do.

Writes are refused where PyTorch refuses them or leaves open what comes of them: to one place for several elements,
and to what is read otherwise by the same op. Some ops write arguments that they do not return; their shapes on fake
tensors cannot be trusted: torch's observers of quantization give their buffers the shape that they need in their
first call.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.capture.fx.advice import REMEDIES, Frames, advice, hands_on, reads_number
from weft.capture.fx.locations import TRACE_FILE, location_of
from weft.capture.fx.private import Refusal, UnwritableView, values_made, written_by, written_copy
from weft.capture.fx.views import views_of
from weft.errors import CaptureError
from weft.files import in_library, installed, standard
from weft.ir.logical import Location

_EXPANDED = (
    "writes to a tensor of which several elements lie at one place in memory, as expand, broadcast_to, unfold and "
    "as_strided make them: PyTorch refuses that, or leaves open what comes of it; clone() the tensor before"
)
_READ = (
    "writes to memory that it reads through another view: PyTorch refuses that, or leaves open what comes of it; "
    "clone() what it reads"
)
_ALIASING = (
    "writes to an argument, or gives a view of one, which in a graph ops of PyTorch alone may do; expected one that "
    "makes new tensors, such as a torch.library.custom_op with mutates_args=()"
)
_RESIZES = (
    "gives a tensor that it writes another shape when it first runs, from {} to {}; call the model once before "
    "compiling"
)
# Up to how many elements an op is tried.
_TRIED = 1 << 25


_VALUE_WORDS = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "trying to get value out of a tracing tensor",
    "GuardOnDataDependentSymNode",
    "UnbackedNumber",
    "FakeTensor.__format__",
)
# For a function that reads memory which no tensor of a trace has, and of one without a kernel.
_NO_MEMORY = ("its data is not allocated yet", ".numpy() is not supported for tensor subclasses")
_BACKENDS = " This could be because the operator doesn't exist for this backend"
_RANDOM = (
    "draws random numbers in a way that would differ from layout to layout; use torch.rand, randn, randint, "
    "multinomial, dropout and the like without a generator, or draw the numbers outside and pass them in the batch"
)
_RANDOM_BACKWARD = (
    "runs in the backward pass, of an autograd.Function or a hook, where random numbers have no number of their own; "
    "draw them in the forward and save them for the backward"
)
_NUMBER = "a number of .item() or .tolist()"
_ONCE = "but the graph is captured once, before any values exist; "
_VALUE = "the step would depend on the values in a tensor ({what}), " + _ONCE
READS = f"reads the values in a tensor, {_ONCE}{REMEDIES['']}"

_WRITTEN = (
    "makes a view at a place that depends on a value, and the view or what it shows is written later; write with "
    "torch.where, index_copy or scatter"
)

_STRIDED = (
    "writes through a view of what as_strided() shows, which cannot become a value; write to a view that indexing, "
    "select, view or narrow makes, or build the result with torch.where, index_copy or scatter"
)
_HIGHER = (
    "calls a higher-order op of torch ({op}), such as torch.cond, scan, while_loop and flex_attention are, which no "
    "graph holds; expected plain tensor code: torch.where for a condition, a loop of Python for a scan, "
    "scaled_dot_product_attention with a mask"
)
_CALLED = "weft calls loss_fn(model, batch), and takes a function that runs the model on a batch and returns the loss"
_HIGHER_ORDER = "no rule registered for HigherOrderOperator "


def refuse(error: Exception, backward_of: tuple[str, int] | None = None) -> CaptureError:
    """The error to raise in place of one that stopped the trace.

    Args:
        error: of the trace.
        backward_of: file and line of what it is the backward of.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    where = _where(frames)
    if not where and backward_of is not None:
        where = source_line(*backward_of) + "in its backward, "
    if isinstance(error, Refusal):
        return CaptureError(where + str(error))
    text = f"{type(error).__name__}: {error}".partition(_BACKENDS)[0]
    op = str(getattr(error, "func", ""))
    if any(word in text for word in _NO_MEMORY):
        reason = _VALUE.format(what="a function reads its memory") + advice(frames, "numpy")
    elif any(word in text for word in _VALUE_WORDS) or (
        isinstance(error, TypeError) and reads_number(frames)
    ):
        reason = _VALUE.format(what=op or _NUMBER) + advice(frames, op, text)
    elif _HIGHER_ORDER in text:
        reason = _HIGHER.format(op=text.partition(_HIGHER_ORDER)[2].partition(" ")[0])
    else:
        reason = f"running the loss function on tensors without data failed with {text}"
        reason += "" if where else f"; {_CALLED}"
    return CaptureError(where + reason)


def refuse_reading(op: str) -> CaptureError:
    """The error for code that uses a value which there is not yet, at the line that runs."""
    frames = list(traceback.walk_stack(sys._getframe(1)))[::-1]
    method = op.removeprefix("Tensor.") if op.startswith("Tensor.") else ""
    return CaptureError(_where(frames) + _VALUE.format(what=op) + advice(frames, error=method))


def running_line() -> str:
    """The user's line that runs, as `source_line` gives it; empty where there is none."""
    return _where(list(traceback.walk_stack(sys._getframe(1)))[::-1])


def refuse_write(view: UnwritableView) -> CaptureError:
    """The error for a write that cannot become a value."""
    return refuse_op(view.node.target, location_of(view.node), _STRIDED)


def refuse_op(op: Any, location: Location | None, reason: str) -> CaptureError:
    """The error for an op that must not stand in a graph."""
    where = source_line(location.file, location.line) if location else ""
    return CaptureError(f"{where}the op {op} {reason}")


def check_ops(graph: torch.fx.Graph, copies: Sequence[torch.fx.Node] = ()) -> None:
    """Refuse ops of a located trace that no logical graph may hold.

    Args:
        graph: the trace.
        copies: nodes that stand for views, which nobody may write.

    Raises:
        CaptureError: naming the user's line.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _check_random(node.target, node, location_of(node))
            reason = reason_against_write(node)
            if reason is not None:
                raise refuse_op(node.target, location_of(node), reason)
        elif node.op == "call_function" and node.target is not operator.getitem:
            raise refuse_op(
                node.target, location_of(node), "is no ATen op; expected plain tensor code"
            )
    for node in copies:
        if written_copy(graph, node):
            raise refuse_op("narrow", location_of(node), _WRITTEN)


def _check_random(
    op: torch._ops.OpOverload, node: torch.fx.Node, location: Location | None
) -> None:
    if torch.Tag.nondeterministic_seeded in op.tags and _draws(op, node):
        raise refuse_op(op, location, _RANDOM)
    if op is torch.ops.weft.uniform.default and location and location.backward:
        raise refuse_op("for random numbers", location, _RANDOM_BACKWARD)


def _draws(op: torch._ops.OpOverload, node: torch.fx.Node) -> bool:
    """True where a random op draws: fused attention is tagged as random, but draws nothing without dropout."""
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


def _where(frames: Frames) -> str:
    """The user's line; where a library of others stopped, its line too."""
    lines = [(f.f_code.co_filename, line) for f, line in frames if not hands_on(f)]
    # In a trace, the frames around what it calls are not the user's.
    calls = [i for i, (file, _) in enumerate(lines) if file == TRACE_FILE]
    lines = lines[calls[-1] + 1 :] if calls else lines
    # The user's line has called Python's own library, such as `json.dumps`.
    found = [each for each in lines if not in_library(each[0]) and not standard(each[0])]
    own = [place for place in found if not installed(place[0])]
    # Code generated by Python, such as methods of dataclasses, has no line.
    shown = [place for place in own if linecache.getline(*place)] or own
    places = dict.fromkeys([*shown[-1:], *[place for place in found[-1:] if place not in own]])
    return "".join(source_line(*place) for place in places)


def reason_against_write(node: torch.fx.Node) -> str | None:
    """The reason why no graph may hold what a node of a trace writes; None where it may, or writes nothing."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.inplace_view in op.tags:
        return None
    every = (*op._schema.arguments, *op._schema.returns)
    if op.namespace not in ("aten", "prims", "weft") and any(each.alias_info for each in every):
        return _ALIASING
    written = [x for x in written_by(op, node.args, node.kwargs) if isinstance(x, torch.fx.Node)]
    others = [x for x in node.all_input_nodes if x not in written] if written else []
    views, read = (views_of(each.meta.get("val") for each in nodes) for nodes in (written, others))
    if any(view.overlaps_itself() for view in views):
        return _EXPANDED
    if any(one.meets(other) for one in views for other in read):
        return _READ
    returned = any(result.alias_info for result in op._schema.returns)
    return None if returned or not op._schema.returns else _tried(op, node, written)


def _tried(op: Any, node: torch.fx.Node, written: list[torch.fx.Node]) -> str | None:
    """The reason against an op that, run on tensors full of ones, gives what it writes another shape."""
    given = {x: x.meta.get("val") for x in node.all_input_nodes}
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    if len(tensors) < len(given) or sum(x.numel() for x in tensors) > _TRIED:
        return None
    with values_made():
        ones = {x: torch.ones(y.shape, dtype=y.dtype) for x, y in zip(given, tensors, strict=True)}
        try:
            op(*torch.fx.map_arg(node.args, ones.get), **torch.fx.map_arg(node.kwargs, ones.get))
        except Exception:  # such values are not for it
            return None
    for each, before in zip(given, tensors, strict=True):
        if each in written and ones[each].shape != before.shape:
            return _RESIZES.format(list(before.shape), list(ones[each].shape))
    return None
