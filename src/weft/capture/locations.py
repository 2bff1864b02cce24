"""From a node of the trace to the user's line: stack traces, module paths, and forward lines for backward ops."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import weft
from weft.capture.fx import (
    backward_sequence_of,
    note,
    notes_of,
    sequence_of,
    set_notes,
)
from weft.ir.logical import Location

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in ')
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(module.__file__)) + os.sep for module in (torch, weft)
)
_MODULE, _BACKWARD, _LOCATION = "weft.module", "weft.backward", "weft.location"


def in_library(file: str) -> bool:
    """Whether a source file belongs to torch or weft, not to the user."""
    return file.startswith(_LIBRARIES)


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


def backward_noted() -> Any:
    """While this lasts, nodes are recorded as part of the backward pass."""
    return note(**{_BACKWARD: True})


def in_backward(node: torch.fx.Node) -> bool:
    """Whether a node of the first trace belongs to the backward pass."""
    return bool(notes_of(node).get(_BACKWARD))


def locate(graph: torch.fx.Graph) -> None:
    """Write the location of every node as its only note, to be read with `location_of`."""
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
        set_notes(node, {_LOCATION: found.get(node)})


def location_of(node: torch.fx.Node) -> Location | None:
    """The location that `locate` found, also on nodes that were made from the located ones."""
    return notes_of(node).get(_LOCATION)


def _forward_location(node: torch.fx.Node) -> Location | None:
    frame = user_frame(node.meta.get("stack_trace") or "")
    return frame and Location(*frame, module=notes_of(node).get(_MODULE, ""))


def _backward_location(
    node: torch.fx.Node,
    forward: dict[int, Location],
    found: dict[torch.fx.Node, Location | None],
) -> Location | None:
    sequence = backward_sequence_of(node)
    origin = None if sequence is None else forward.get(sequence)
    if origin is None:
        # Sums of gradients run between autograd nodes: they belong where their operands do.
        operands = (found.get(operand) for operand in node.all_input_nodes)
        origin = next((place for place in operands if place is not None), None)
    return origin and Location(origin.file, origin.line, origin.module, backward=True)


@lru_cache(maxsize=4096)
def user_frame(stack: str) -> tuple[str, int] | None:
    """The innermost frame of the user's own code inside a stack trace, as (file, line); None when there is none."""
    for match in reversed(list(_FRAME.finditer(stack))):
        if not in_library(match["file"]):
            return match["file"], int(match["line"])
    return None
