"""Every call of a graph on operands that lie in memory in other ways than they were captured with.

A kernel may see strides that capture did not: boxing makes tensors contiguous, and an element-wise op
lays its result as its operands lie. So what a kernel makes must depend on values alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tools.oracles.rules import UNINITIALIZED, close
from weft.ir.logical import Call, LogicalGraph
from weft.layout import Broadcast
from weft.ops import localize
from weft.ops.call import OpCall, Signature
from weft.ops.rule import kept_results
from weft.runtime.kernels.generated import local_function
from weft.runtime.torch_ops import to_torch

# Their results are not defined, or drawn.
_UNDEFINED = UNINITIALIZED | {"aten.new_empty_strided.default", "weft.uniform"}
# Of equal elements, the order is not defined, and what is divided by their deviation is noise.
_OF_EQUAL = ("sort", "batch_norm")
_SEEN: set[Any] = set()


def stride_problems(graph: LogicalGraph, values: Mapping[str, Tensor]) -> Iterator[str]:
    """What is wrong with a graph's calls on operands that lie otherwise; each kind of call once."""
    for node in graph.of_kind(Call):
        call = node.first
        if call in _SEEN:
            continue
        _SEEN.add(call)
        yield from call_problems(call, [values[name] for name in node.operands])


def call_problems(call: OpCall, tensors: Sequence[Tensor]) -> Iterator[str]:
    """What is wrong with one call on operands that lie otherwise: one of them, or all."""
    if call.op in _UNDEFINED:
        return
    whole = (Broadcast(),)
    same = Signature(whole * len(call.operands), whole * len(call.results))
    local = localize(call, same, 1, 0)
    numbers = tuple(range(len(tensors)))
    for name, form in FORMS.items():
        if name == "expanded" and any(word in call.op for word in _OF_EQUAL):
            continue
        for laid in dict.fromkeys((*((number,) for number in numbers), numbers)):
            given = [
                _repeated(x) if name == "expanded" and number in laid else x
                for number, x in enumerate(tensors)
            ]
            other = [form(x) if number in laid else x for number, x in enumerate(given)]
            if any(a is not b for a, b in zip(given, other, strict=True)):
                problem = _difference(local, given, other)
                if problem:
                    yield f"{call.op}: operands {laid} {name}: {problem}"


def _difference(call: OpCall, given: Sequence[Tensor], other: Sequence[Tensor]) -> str:
    try:
        expected = run(call, given)
    except Exception:  # values that the op refuses
        return ""
    try:
        found = run(call, other)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    for number, (one, whole) in enumerate(zip(found, expected, strict=True)):
        opaque = number in kept_results(call.op)  # only its backward can read it
        if whole is not None and not opaque and (one is None or not close(one, whole, 1e-4)):
            return f"result {number} differs"
    return ""


def run(call: OpCall, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The results of a call as a rank's kernel makes them; None for what is no tensor."""
    kwargs = {name: to_torch(value, tensors) for name, value in call.kwargs}
    made = local_function(call.op)(*to_torch(call.args, tensors), **kwargs)
    results = made if isinstance(made, tuple | list) else (made,)
    return [x if isinstance(x, Tensor) else None for x in results]


# ------------------------------------------------------------------------------------------ forms


def _transposed(x: Tensor) -> Tensor:
    """Dimensions in memory in the opposite order."""
    dims = list(range(x.dim()))[::-1]
    return x.permute(dims).contiguous().permute(dims) if x.dim() > 1 else x


def _sliced(x: Tensor) -> Tensor:
    """Every second element of a larger tensor, behind its first ones."""
    if not x.dim():
        return x
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1] + 2))[..., 2::2]
    return wide.copy_(x)


def _rows(x: Tensor) -> Tensor:
    """A part of a larger tensor, along the second dimension."""
    if x.dim() < 2:
        return x
    wide = x.new_zeros((x.shape[0], x.shape[1] + 2, *x.shape[2:]))[:, 1:-1]
    return wide.copy_(x)


def _channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def _left(x: Tensor) -> Tensor:
    """Channels last, and strides of dimensions of size 1 as transposing leaves them: any numbers."""
    if 1 not in x.shape or not 1 < x.dim() < 6:
        return x
    last = _channels_last(x)
    strides = [1 if size == 1 else one for size, one in zip(x.shape, last.stride(), strict=True)]
    return last.as_strided(x.shape, strides)


def _repeated(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape).contiguous() if x.dim() and x.shape[0] else x


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if x.dim() and x.shape[0] > 1 else x


FORMS = {
    "transposed": _transposed,
    "sliced": _sliced,
    "rows": _rows,
    "channels last": _channels_last,
    "left by transposing": _left,
    "expanded": _expanded,
}
