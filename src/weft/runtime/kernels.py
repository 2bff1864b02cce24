"""Segments as generated Python functions over ATen overloads.

The source is kept: `linecache` knows it, so that a traceback shows the failing call. Intermediate
values are deleted after their last use. Segments with the same source, such as those of repeated
layers, share one code object.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from weft.ir.logical import Arg, Ref, refs
from weft.ir.plan import LocalCall
from weft.ops.call import Token
from weft.runtime.local_ops import LOCAL_OPS, VIEW_OPS
from weft.runtime.torch_ops import torch_op, torch_value

UNIFORM = "weft.uniform"


@dataclass(frozen=True)
class Kernel:
    """A compiled run of local calls.

    Attributes:
        inputs: names of the values that it takes, in the order of `function`'s arguments after
            `draw` (`draw(size, offset, length, salt, dtype=, device=)` draws `weft.uniform` for the
            step that runs).
        outputs: names of the values that it returns.
        source: what `function` was compiled from.
        function: `function(draw, *inputs) -> tuple of outputs`.
        draws: whether it calls `draw`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    function: Callable[..., tuple[Tensor, ...]]
    draws: bool


def build_kernel(
    calls: Sequence[LocalCall],
    outputs: Sequence[str],
    device: torch.device,
    copied: Collection[str] = (),
) -> Kernel:
    """Compile local calls into one function.

    Args:
        calls: in an order in which they may run.
        outputs: names of the values to return; calls' results or values from outside.
        device: the rank's device; device constants of its type mean it.
        copied: outputs to return as copies.
    """
    inputs = _inputs(calls, outputs)
    names = {name: f"a{index}" for index, name in enumerate(inputs)}
    lines, bound = _body(calls, outputs, names, device)
    returned = [f"{names[name]}.clone()" if name in copied else names[name] for name in outputs]
    arguments = ", ".join(["draw", *(names[name] for name in inputs)])
    result = f"    return ({''.join(f'{text}, ' for text in returned)})"
    source = "\n".join([f"def segment({arguments}):", *lines, result, ""])
    namespace: dict[str, Any] = {"inf": math.inf, "nan": math.nan, **bound}
    exec(_compile(source), namespace)
    draws = any(call.op == UNIFORM for call in calls)
    return Kernel(inputs, tuple(outputs), source, namespace["segment"], draws)


@lru_cache(maxsize=4096)
def _compile(source: str) -> CodeType:
    """Compile a source once and make tracebacks find it."""
    name = f"<weft segment {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Without a modification time, linecache keeps the lines for good.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")


def call_refs(call: LocalCall) -> Iterable[str]:
    """The names of the values that a call reads."""
    yield from refs(call.args)
    for _, arg in call.kwargs:
        yield from refs(arg)


def _inputs(calls: Sequence[LocalCall], outputs: Sequence[str]) -> tuple[str, ...]:
    """Values from outside, in the order of their first use."""
    made: set[str] = set()
    found: dict[str, None] = {}
    for call in calls:
        found.update(dict.fromkeys(name for name in call_refs(call) if name not in made))
        made.update(value.name for value in call.outputs if value is not None)
    found.update(dict.fromkeys(name for name in outputs if name not in made))
    return tuple(found)


def _body(
    calls: Sequence[LocalCall], outputs: Sequence[str], names: dict[str, str], device: torch.device
) -> tuple[list[str], dict[str, Any]]:
    """The lines of the function and what its global names stand for; fills `names` with the local names of values."""
    last = {name: index for index, call in enumerate(calls) for name in call_refs(call)}
    bound: dict[str, Any] = {}
    lines = []
    for index, call in enumerate(calls):
        made = [value.name for value in call.outputs if value is not None]
        text = _call_text(call, names, bound, device)
        for name in made:
            names[name] = f"v{len(names)}"
        lines.append(f"    {_targets(call, names)}{text}")
        dead = [name for name in dict.fromkeys(call_refs(call)) if last[name] == index]
        dead += [name for name in made if name not in last]
        gone = [names[name] for name in dead if name not in outputs]
        if gone:
            lines.append(f"    del {', '.join(gone)}")
    return lines, bound


def _call_text(
    call: LocalCall, names: dict[str, str], bound: dict[str, Any], device: torch.device
) -> str:
    def text(arg: Arg) -> str:
        match arg:
            case Ref(name=name):
                return names[name]
            case Token():
                return _bind_token(arg, bound, device)
            case tuple():
                return f"[{', '.join(map(text, arg))}]"
            case _:
                return repr(arg)

    arguments = [text(arg) for arg in call.args]
    arguments += [f"{key}={text(arg)}" for key, arg in call.kwargs]
    return f"{_bind_op(call.op, bound)}({', '.join(arguments)})"


def _bind_token(token: Token, bound: dict[str, Any], device: torch.device) -> str:
    name = re.sub(r"\W", "_", f"{token.kind}_{token.name}")
    if name not in bound:
        value = torch_value(token)
        here = token.kind == "device" and value.type == device.type
        bound[name] = device if here else value
    return name


def _bind_op(op: str, bound: dict[str, Any]) -> str:
    if op == UNIFORM:
        return "draw"
    name = re.sub(r"\W", "_", op)
    bound[name] = LOCAL_OPS[op] if op in LOCAL_OPS else torch_op(op)
    return name


def _targets(call: LocalCall, names: dict[str, str]) -> str:
    """The left side of a call: `v3 = `, `v3, _ = `, `(v3,) = ` for a list of one, or nothing."""
    targets = ["_" if value is None else names[value.name] for value in call.outputs]
    if not targets:
        return ""
    if len(targets) > 1 or _returns_list(call.op):
        return f"({', '.join(targets)},) = "
    return f"{targets[0]} = "


def _is_local(op: str) -> bool:
    return op in LOCAL_OPS or op == UNIFORM


def _returns_list(op: str) -> bool:
    if _is_local(op):
        return False
    returns = _returns(op)
    return len(returns) == 1 and "List" in str(returns[0].type)


def _may_alias(op: str) -> bool:
    """Whether a result of the op may share memory with an operand."""
    if _is_local(op):
        return op in VIEW_OPS
    return any(result.alias_info is not None for result in _returns(op))


def _returns(op: str) -> Sequence[Any]:
    """What torch's schema says of the op's results."""
    returns: Sequence[Any] = torch_op(op)._schema.returns
    return returns


def aliases(calls: Sequence[LocalCall], names: Collection[str]) -> set[str]:
    """The values that may share memory with one of `names`, those included."""
    found = set(names)
    for call in calls:
        if any(name in found for name in call_refs(call)) and _may_alias(call.op):
            found.update(value.name for value in call.outputs if value is not None)
    return found
