"""Errors of tracing in the user's words: the line, the reason against it, and a remedy.

Code that reads tensor values, which do not exist during capture, gets a remedy from one table,
chosen by the torch function called, the op that lacked a value, and the form of the Python line.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from weft.capture.fx.locations import TRACE_FILE, hands_on, location_of
from weft.capture.fx.private import Refusal, UnwritableView
from weft.errors import CaptureError
from weft.files import PACKAGE, in_library, installed, standard
from weft.ir.logical import Location

# The frames of code that was refused, outermost first, each with the line that it was at.
Frames: TypeAlias = Sequence[tuple[FrameType, int]]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

REMEDIES = {
    "check": "a check stays one, in every step, where it asks for the truth of a tensor: assert (x <= n).all(), or if "
    "(x > n).any(): raise …, with no .item(), int(), float() or .tolist() in it, and no try … except and no context "
    "of your own (with) around it that could catch the error",
    "check without source": "a check (assert, or if …: raise) stays one where Python has the source of its line, and "
    "there is none of this code: write it in a file",
    "check of a distribution": "give the distribution validate_args=False; MultivariateNormal takes scale_tril=, too",
    "branch": "a branch: compute both sides and choose, x = torch.where(condition, f(x), x); for and, or, not, max() "
    "and min() of Python write &, |, ~, torch.maximum and torch.minimum; to print or to warn, return the condition and "
    "look at it after the step",
    "loop": "a loop: make a fixed number of turns, and let torch.where keep what is done",
    "mask": "a mask selects as many elements as are true: keep all of them, x = torch.where(mask, f(x), x); for a "
    'mean, reduction="none" and (loss * mask).sum() / mask.sum(); for labels, ignore_index=-100 of cross_entropy; for '
    "ctc_loss, padded targets of shape [batch, length] and target_lengths",
    "bincount": "bincount(x, minlength=n) of numbers below n is F.one_hot(x, n).sum(0)",
    "unique": "unique finds as many elements as there are: of whole numbers below n, F.one_hot(x, n).sum(0) counts "
    "each; (x.sort().values.diff() != 0).sum() + 1 says how many differ",
    "classes": "F.one_hot takes num_classes=",
    "repeats": "repeat_interleave by a tensor takes output_size=, the number of rows that it makes in all",
    "number": "leave the number a tensor: without .item(), int() and float() it counts as a number does, as in "
    "loss / mask.sum(); to show it, return it and print it after the step",
    "size": "a size: take the largest that there is, and a mask, torch.arange(n) < length, in place of x[:length]; or "
    "pass the size in the batch, as a number of Python",
    "index": "an index of one place: x.index_select(dim, i.reshape(1)).squeeze(dim), or torch.take_along_dim for one "
    "of each row; to write, index_copy or scatter; a list of tensors is stacked first, torch.stack(tensors)",
    "stack": "torch.tensor reads what it is given: take the tensor as it is, and torch.stack(tensors) of several",
    "list": "tolist() gives no numbers while the step is captured: for torch.arange(…).tolist() write range(…), "
    "continue "
    "with the tensor, or pass a list of numbers in the batch",
    "numpy": "numpy and scipy read memory: write it with ops of torch; or compute it before the step, as the matching "
    "of linear_sum_assignment from what program.evaluation gives, and pass the result in the batch",
    "": "keep values in tensors (torch.where, masks of fixed shape); .item() may only be returned",
}
# The kinds, by the name of the function that was called; by that of its op where torch calls that "fn".
_KINDS = {
    **dict.fromkeys(("__bool__", "__contains__", "is_nonzero", "equal", "allclose"), "branch"),
    **dict.fromkeys(("nonzero", "masked_select", "argwhere", "where", "__getitem__"), "mask"),
    **dict.fromkeys(("unique", "_unique2", "unique_dim", "unique_consecutive"), "unique"),
    **dict.fromkeys(("numpy", "__array__"), "numpy"),
    **dict.fromkeys(("__int__", "__float__", "__complex__", "__format__", "item"), "number"),
    "bincount": "bincount",
    "repeat_interleave": "repeats",
    "one_hot": "classes",
    **dict.fromkeys(("tensor", "as_tensor", "asarray"), "stack"),
    "tolist": "list",
}
# Functions whose numbers are sizes.
_SIZED = {
    *("arange", "empty", "expand", "full", "interpolate", "linspace", "narrow", "ones", "pad"),
    *("rand", "randint", "randn", "randperm", "repeat", "reshape", "tile", "topk", "unflatten"),
    *("unfold", "view", "zeros"),
}
# Folders of torch whose code is like a user's.
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions")
_PLAIN = (_DISTRIBUTIONS, os.path.join(_TORCH, "nn", ""))
_TRUTHS = ("check", "branch", "loop", "check without source")
# Options of `transformers` that do without, by words in its line or the name of its function.
_OPTIONS = {
    "layerdrop": "set layerdrop=0 in the model's config",
    "layer_drop": "set layer_drop=0 in the model's config",
    "_check_tensor_all": "set TRANSFORMERS_DISABLE_TORCH_CHECK=1 in the environment",
    "_mask_hidden_states": "set apply_spec_augment=False in the model's config",
    "masked_select(labels_mask)": "call the model without labels, and F.ctc_loss with padded targets on its logits",
}
_EXPERTS = (
    'load or configure the model with experts_implementation="grouped_mm", the default of transformers, whose '
    "shapes do not depend on where tokens are routed"
)
_OWN_EXPERTS = (
    "transformers has no experts_implementation for this model: put experts in their place that compute all tokens, "
    "weighed by the router, or take a model whose experts can be grouped"
)


def advice(frames: Frames, op: str = "", error: str = "") -> str:
    """The remedy for the code that was refused.

    Args:
        frames: of the code.
        op: that found no value.
        error: text of an error of torch, which may begin with the function that was called.
    """
    for each, at in reversed(frames):
        if "transformers" in each.f_code.co_filename and (found := _option(each, at)):
            return found
    call, given, (frame, line) = _called(frames)
    call = call or error.removeprefix("TypeError: ").partition("()")[0]
    name, form = op.removeprefix("aten.").partition(".")[0], _form(frame, line)
    kind = _KINDS.get(name if call == "fn" else call, "")
    if call in ("__getitem__", "__setitem__", "__index__") and name != "nonzero":
        kind = "size" if form == "range" or _cuts(given[1:2]) else "index"
    elif kind in ("", "number") and form == "list":
        kind = "list"
    elif kind == "branch" and frame and _DISTRIBUTIONS in frame.f_code.co_filename:
        kind = "check of a distribution"
    elif kind == "branch" or (not kind and form in _TRUTHS[:3]):
        kind = form if form in _TRUTHS else "branch"
    elif kind in ("", "number") and name in ("", "_local_scalar_dense"):
        kind = "size" if form == "range" or call in _SIZED else "number"
    return REMEDIES[kind]


def reads_number(frames: Frames) -> bool:
    """True if torch, or Python's own library, such as `json`, was given a number that is not there yet."""
    _, given, (frame, line) = _called(frames)
    own = list(frames[-1][0].f_locals.values()) if frames else []
    held = [*given, *own] if not given or standard(frames[-1][0].f_code.co_filename) else given
    later = any(type(x).__name__ == "UnbackedNumber" for x in tree_leaves(held))
    return later or (not given and _form(frame, line) == "list")


def _option(frame: FrameType, line: int) -> str:
    """The option of `transformers` by which this code of it needs no values; "" if none is known."""
    file, code = frame.f_code.co_filename, frame.f_code.co_name
    if "Experts" in type(frame.f_locals.get("self")).__name__:
        groups = any("use_experts_implementation" in each for each in linecache.getlines(file))
        return _EXPERTS if groups else _OWN_EXPERTS
    code += linecache.getline(file, line)
    return next((option for word, option in _OPTIONS.items() if word in code), "")


def _called(frames: Frames) -> tuple[str, Sequence[Any], tuple[FrameType | None, int]]:
    """The function of torch that code has called, by name, what it was given, and the place of the call."""
    call, given = "", list[Any]()
    for frame, line in reversed(frames):
        file = frame.f_code.co_filename
        own, torchs = file.startswith(PACKAGE), file.startswith(_TORCH)
        if frame.f_code.co_name == "__torch_function__" and (own or hands_on(frame)):
            values = frame.f_locals
            call = getattr(values.get("func"), "__name__", call)
            given = [*(values.get("args") or ()), *(values.get("kwargs") or {}).values()]
        elif not own and (not torchs or (call and file.startswith(_PLAIN))):
            return call, given, (frame, line)
    return call, given, (None, 0)


def _cuts(keys: Sequence[Any]) -> bool:
    """True if an index has a slice that ends at a tensor."""
    parts = [part for key in keys for part in (key if isinstance(key, tuple) else (key,))]
    slices = [(x.start, x.stop, x.step) for x in parts if isinstance(x, slice)]
    return any(isinstance(end, torch.Tensor) for each in slices for end in each)


def _form(frame: FrameType | None, line: int) -> str:
    """The form of the line that a frame is at: "check", "loop", "branch", "range", "list"; "" for others."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals) if frame else []
    if frame and not lines:
        return "check without source"
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return ""
    found = {_form_of(node) for node in ast.walk(tree) if _is_at(node, line)}
    return next(
        (kind for kind in ("check", "loop", "branch", "range", "list") if kind in found), ""
    )


def _is_at(node: Any, line: int) -> bool:
    """True if a line belongs to a node, of statements with a test to this."""
    head = node.test if isinstance(node, ast.If | ast.While) else node
    return bool(getattr(head, "lineno", line + 1) <= line <= getattr(head, "end_lineno", 0))


def _form_of(node: ast.AST) -> str:
    match node:
        case ast.Assert() | ast.If(body=[*_, ast.Raise()]):
            return "check"
        case ast.If() | ast.IfExp():
            return "branch"
        case ast.While():
            return "loop"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            if name in _SIZED and not any(map(_is_number, ast.walk(node))):
                return ""
            kinds = {**dict.fromkeys(_SIZED, "range"), "range": "range", "tolist": "list"}
            return "check" if name.startswith(("_check", "_assert")) else kinds.get(name, "")
    return ""


def _is_number(node: ast.AST) -> bool:
    """True for `int(x)` and `x.item()`."""
    match node:
        case ast.Call(func=ast.Name(id="int") | ast.Attribute(attr="item")):
            return True
    return False


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
_NUMBER = "a number of .item() or .tolist()"
_ONCE = "but the graph is captured once, before any values exist; "
_VALUE = "the step would depend on the values in a tensor ({what}), " + _ONCE
READS = f"reads the values in a tensor, {_ONCE}{REMEDIES['']}"


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
    """The user's line that runs, as `source_line` gives it; empty if there is none."""
    return _where(list(traceback.walk_stack(sys._getframe(1)))[::-1])


def refuse_write(view: UnwritableView) -> CaptureError:
    """The error for a write that cannot become a value."""
    return refuse_op(view.node.target, location_of(view.node), _STRIDED)


def refuse_op(op: Any, location: Location | None, reason: str) -> CaptureError:
    """The error for an op that must not be in a graph."""
    where = source_line(location.file, location.line) if location else ""
    return CaptureError(f"{where}the op {op} {reason}")


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
