"""From a node of the trace to the user's line: called lines, module paths, and forward lines for backward ops."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from weft.capture.fx.advice import hands_on
from weft.capture.fx.checkpoints import checkpoint_of
from weft.capture.fx.private import (
    backward_sequence_of,
    nodes_so_far,
    note,
    notes_of,
    sequence_of,
    set_notes,
)
from weft.files import PACKAGE, in_library
from weft.ir.logical import Location

# The frame that calls the user's function: frames around it are not the model's.
TRACE_FILE = os.path.join(PACKAGE, "capture", "tracing", "trace.py")
_FRAME, _MODULE, _STAGE = "weft.frame", "weft.module", "weft.stage"
_BACKWARD, _LOCATION, _AUTOGRAD = "weft.backward", "weft.location", "weft.autograd"


@final
class LinesNoted(TorchFunctionMode):
    """While this lasts, nodes are recorded with the user's line that called into torch."""

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
    """While this lasts, nodes are recorded with the path of the submodule whose forward runs."""
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
    """While this lasts, nodes are recorded as part of a stage."""
    return note(**{_STAGE: index})


def backward_noted() -> Any:
    """While this lasts, nodes are recorded as part of the backward pass."""
    return note(**{_BACKWARD: True})


def in_backward(node: torch.fx.Node) -> bool:
    """True where a node belongs to the backward pass; `locate` keeps that."""
    return bool(notes_of(node).get(_BACKWARD))


def locate(graph: torch.fx.Graph) -> None:
    """Write what is known of every node as notes that go on to what is made of it.

    They are read with `location_of` and `autograd_of`; of the notes before only `in_backward` stays.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    forward: dict[int, Location] = {}
    found: dict[torch.fx.Node, Location | None] = {}
    for node in calls:
        if in_backward(node):
            found[node] = _backward_location(node, forward, found)
            continue
        found[node] = location = _forward_location(node)
        sequence = sequence_of(node)
        if sequence is not None and location is not None:
            forward.setdefault(sequence, location)
    for node in graph.nodes:
        backward = in_backward(node)
        autograd = backward_sequence_of(node) if backward else sequence_of(node)
        notes = {_LOCATION: found.get(node), _BACKWARD: backward, _AUTOGRAD: autograd}
        set_notes(node, notes)


def location_of(node: torch.fx.Node) -> Location | None:
    """The location that `locate` found, also on nodes that were made from the located ones."""
    return notes_of(node).get(_LOCATION)


def autograd_of(node: torch.fx.Node) -> int | None:
    """The number that autograd gave the node that a forward op made, and in whose backward a backward op ran."""
    return notes_of(node).get(_AUTOGRAD)


def _forward_location(node: torch.fx.Node) -> Location | None:
    frame = notes_of(node).get(_FRAME)
    if frame is None:
        return None
    file, line = frame
    notes = notes_of(node)
    module, stage = notes.get(_MODULE, ""), notes.get(_STAGE)
    region = checkpoint_of(notes)
    return Location(file, line, module, stage=stage, checkpoint=region)


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
