"""The user's line of each node of the trace, its module path and its checkpoint.

A backward op has the line of the forward op that it belongs to.
"""

from __future__ import annotations

import linecache
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from itertools import count, islice
from types import FrameType
from typing import Any, final
from unittest.mock import patch

import torch
import torch.utils.checkpoint as checkpoints
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.fx.private import (
    backward_sequence_of,
    nodes_so_far,
    note,
    notes_now,
    notes_of,
    running_sequence,
    sequence_of,
    set_notes,
)
from weft.errors import LayoutError, StrategyError, wrong
from weft.files import PACKAGE, in_library
from weft.ir.logical import Location
from weft.layout import SBP, Broadcast, Partial, Split

# The frame that calls the user's function: frames around it are not the model's.
TRACE_FILE = os.path.join(PACKAGE, "capture", "tracing", "trace.py")
_FRAME, _MODULE, _STAGE = "weft.frame", "weft.module", "weft.stage"
_BACKWARD, _LOCATION, _AUTOGRAD = "weft.backward", "weft.location", "weft.autograd"


@final
class LinesNoted(TorchFunctionMode):
    """Within the context, nodes are recorded with the user's line that called into torch."""

    def __init__(self) -> None:
        super().__init__()
        # The lines in their order, and how many autograd nodes there were after each.
        self._lines: list[tuple[str, int]] = []
        self._counts: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = _user_frame()
        if frame is None:
            return func(*args, **(kwargs or {}))
        with note(**{_FRAME: frame}):
            result = func(*args, **(kwargs or {}))
        self._lines.append(frame)
        self._counts.append(nodes_so_far())
        return result

    def line_of(self, sequence: int) -> tuple[str, int] | None:
        """File and line of the call that made an autograd node of this number."""
        at = bisect_right(self._counts, sequence)
        return self._lines[at] if at < len(self._lines) else None


@contextmanager
def module_paths_noted(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, nodes are recorded with the path of the submodule whose forward runs."""
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    running: list[ExitStack] = []

    def enter(module: torch.nn.Module, *_: Any) -> None:
        if id(module) in paths:
            running.append(ExitStack())
            running[-1].enter_context(note(**{_MODULE: paths[id(module)]}))

    def leave(module: torch.nn.Module, *_: Any) -> None:
        if id(module) in paths:
            running.pop().close()

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def stage_noted(index: int) -> AbstractContextManager[None]:
    """Within the context, nodes are recorded as part of a stage."""
    return note(**{_STAGE: index})


def backward_noted() -> Any:
    """Within the context, nodes are recorded as part of the backward pass."""
    return note(**{_BACKWARD: True})


def in_backward(node: torch.fx.Node) -> bool:
    """True if a node belongs to the backward pass; `locate` keeps that."""
    return bool(notes_of(node).get(_BACKWARD))


def locate(graph: torch.fx.Graph) -> None:
    """Write the location of every node into its metadata, which derived nodes inherit.

    They are read with `location_of` and `autograd_of`; of the notes before only `in_backward` stays.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    forward: dict[int, Location] = {}
    found: dict[torch.fx.Node, Location | None] = {}
    for node in calls:
        if in_backward(node):
            found[node] = _backward_location(node, forward, found)
            continue
        notes, location = notes_of(node), None
        if _FRAME in notes:
            file, line = notes[_FRAME]
            stage, region = notes.get(_STAGE), checkpoint_of(notes)
            location = Location(file, line, notes.get(_MODULE, ""), stage=stage, checkpoint=region)
        found[node] = location
        sequence = sequence_of(node)
        if sequence is not None and location is not None:
            forward.setdefault(sequence, location)
    for node in graph.nodes:
        backward = in_backward(node)
        autograd = backward_sequence_of(node) if backward else sequence_of(node)
        made = {_LOCATION: found.get(node), _BACKWARD: backward, _AUTOGRAD: autograd}
        set_notes(node, made)


def location_of(node: torch.fx.Node) -> Location | None:
    """The location that `locate` found, also on nodes that were made from the located ones."""
    return notes_of(node).get(_LOCATION)


def autograd_of(node: torch.fx.Node) -> int | None:
    """The number that autograd gave the node that a forward op made, and in whose backward a backward op ran."""
    return notes_of(node).get(_AUTOGRAD)


def _backward_location(
    node: torch.fx.Node,
    forward: dict[int, Location],
    found: dict[torch.fx.Node, Location | None],
) -> Location | None:
    sequence = backward_sequence_of(node)
    origin = None if sequence is None else forward.get(sequence)
    if origin is None:
        # Sums of gradients run between autograd nodes: they belong where their operands do. A node without operands
        # is the seed of the backward: it belongs to the loss, the last line of the forward.
        operands = [found.get(operand) for operand in node.all_input_nodes]
        places = operands or list(forward.values())[-1:]
        origin = next((place for place in places if place is not None), None)
    return origin and replace(origin, backward=True, checkpoint=None)


def _user_frame() -> tuple[str, int] | None:
    """(file, line) of the innermost frame of the user's own code, inside of the traced function."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != TRACE_FILE:
        if not in_library(frame.f_code.co_filename) and not hands_on(frame):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


# `torch.utils.checkpoint` in a step: what it wraps runs once, and is marked for the backward to make again.
#
# The plan makes it again as `Strategy(recompute=)` does, with the same random numbers; so both forms of
# checkpoints may hold dropout. Policies of selective checkpoints decide nothing: all is made again.
#
# Private API: `CheckpointFunction` and `_checkpoint_without_reentrant_generator` of
# `torch.utils.checkpoint`, which its `checkpoint` looks up by name.


_CHECKPOINT = "weft.checkpoint"


@contextmanager
def checkpoints_noted() -> Iterator[None]:
    """Within the context, nodes are recorded with the number of the outermost checkpoint around them."""
    numbers = count()

    @contextmanager
    def region() -> Iterator[None]:
        # In a backward, as of a checkpoint written by hand, everything is made again already.
        inside = _CHECKPOINT in notes_now() or running_sequence() is not None
        with note(**({} if inside else {_CHECKPOINT: next(numbers)})):
            yield

    @final
    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            # As torch does: nothing inside is trained when no argument asks for a gradient.
            asks = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with region(), torch.set_grad_enabled(asks and torch.is_grad_enabled()):
                return function(*args)

    def around(
        _: Any, _preserve: bool, contexts: Any, *_args: Any, **_kwargs: Any
    ) -> Iterator[None]:
        forward, _again = contexts()
        with region(), nullcontext() if isinstance(forward, TorchDispatchMode) else forward:
            yield

    with (
        patch.object(checkpoints, "CheckpointFunction", Reentrant),
        patch.object(checkpoints, "_checkpoint_without_reentrant_generator", around),
    ):
        yield


def checkpoint_of(notes: Mapping[str, Any]) -> int | None:
    """The number of the checkpoint in the notes on a node."""
    number: int | None = notes.get(_CHECKPOINT)
    return number


def hands_on(frame: FrameType) -> bool:
    """True if a `TorchFunctionMode` of the user's is at the call of the function that it was given."""
    code = frame.f_code
    if code.co_name != "__torch_function__" or sys.version_info < (3, 11):
        return False
    line, _, column, _ = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    source = linecache.getline(code.co_filename, line or 0).encode()
    return source[column or 0 :].startswith(f"{code.co_varnames[1]}(".encode())


_capturing: ContextVar[bool] = ContextVar("weft_capturing", default=False)


def hint(x: torch.Tensor, sbp: SBP | tuple[SBP, ...]) -> torch.Tensor:
    """Fix how `x` is laid out on the placement: one SBP for each axis of the grid.

    Outside of `weft.compile` this returns `x` itself. The gradient of `x` is not fixed by it.

    Raises:
        LayoutError: when `sbp` is not an SBP, or a tuple of them.
    """
    parts = sbp if isinstance(sbp, tuple) else (sbp,)
    if not parts or not all(isinstance(part, Split | Broadcast | Partial) for part in parts):
        raise LayoutError(
            f"hint: expected an SBP such as weft.split(0), or one for each axis of the grid, got {sbp!r}"
        )
    if not capturing():
        return x
    marked: torch.Tensor = torch.ops.weft.hint(x, ",".join(map(str, parts)))
    return marked


def capturing() -> bool:
    """True while this thread captures a step."""
    return _capturing.get()


@contextmanager
def hints_recorded() -> Iterator[None]:
    """Within the context, `hint` leaves a mark in the graph."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


@torch.library.custom_op("weft::hint", mutates_args=(), schema="(Tensor x, str sbp) -> Tensor")
def _hint(x: torch.Tensor, sbp: str) -> torch.Tensor:
    return x.clone()


@_hint.register_fake
def _(x: torch.Tensor, sbp: str) -> torch.Tensor:
    return torch.empty_like(x)


_hint.register_autograd(lambda context, gradient: (gradient, None))


def stage(index: int) -> AbstractContextManager[None]:
    """Within the context, what the model computes belongs to stage `index`, counted from 0; its backward too.

    It takes effect in `weft.compile` with a strategy that has stages, where no pattern of a stage
    says otherwise. The innermost one counts.

    Raises:
        StrategyError: when `index` is not a whole number from 0.
    """
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise wrong("weft.stage: index", "the number of a stage, from 0", index, StrategyError)
    return stage_noted(index) if capturing() else nullcontext()
