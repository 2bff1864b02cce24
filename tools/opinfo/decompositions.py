"""The decompositions that capture takes, torch's own and weft's, against the kernels that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tools.opinfo.reference import Backward, values_and_gradients
from tools.opinfo.samples import Case
from tools.oracles.rules import close
from weft.capture.fx.private import Decompositions, DispatchMode
from weft.capture.ops import random
from weft.capture.ops.decompositions import decompositions, fallback

# Kernels that do not check their indices, and may end the process.
_TRUSTING = ("nll_loss",)
# Those of which capture makes ops of weft.
_BECOME_WEFTS = (
    *("aten._grouped_mm.default", "aten.linalg_lstsq.default"),
    *("aten._ctc_loss.Tensor", "aten._ctc_loss_backward.Tensor"),
)
_SEEN: set[Any] = set()


def decomposition_problems(case: Case) -> Iterator[str]:
    """Which decompositions of ops that a sample runs, forward and backward, differ from the kernels.

    They are compared on the sample's own numbers and on edges: ties, zeros, indices of -1.
    """
    with _Calls() as calls:
        values_and_gradients(case, [x.clone() for x in case.tensors], Backward())
    for op, arguments in calls.found:
        for edge, change in EDGES.items():
            if edge != "indices of -1" or not any(word in str(op) for word in _TRUSTING):
                yield from _compared(op, edge, pytree.tree_map_only(Tensor, change, arguments))


def _compared(op: Any, edge: str, arguments: Any) -> Iterator[str]:
    key = (op, edge, str(pytree.tree_map_only(Tensor, lambda x: (x.shape, x.dtype), arguments)))
    if key in _SEEN:
        return
    _SEEN.add(key)
    args, kwargs = arguments
    try:
        expected = _tensors(op(*args, **kwargs))
    except Exception:  # what the kernel refuses
        return
    try:
        made = table()[op](*args, **kwargs)
    except Exception as error:
        yield f"the decomposition of {op} raises {error} on {edge}: {key[2][:160]}"
        return
    if made is NotImplemented:
        return
    found = _tensors(made)
    same = len(found) == len(expected) and all(
        close(one.resolve_conj(), other.resolve_conj(), 1e-3)
        for one, other in zip(found, expected, strict=True)
    )
    if not same:
        yield f"the decomposition of {op} differs from its kernel on {edge}: {key[2][:160]}"


@cache
def table() -> Decompositions:
    """What capture takes apart, but for random ops, whose numbers are weft's own, and what becomes ops of weft."""
    every: dict[Any, Callable[..., Any]] = {**fallback(), **decompositions()}
    left_out = {*random.TABLE, *(op for op in every if str(op) in _BECOME_WEFTS)}
    return {op: one for op, one in every.items() if op not in left_out}


class _Calls(DispatchMode):
    """Notes the calls of ops that have a decomposition."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in table() and not func._schema.is_mutable:
            copied = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
            self.found.append((func, copied))
        return func(*args, **kwargs)


def _tensors(results: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]


def _every(x: Tensor, step: int, value: float) -> Tensor:
    """A copy in which every element number `step` is `value`."""
    changed = x.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[::step] = value
    return changed


EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "the sample": lambda x: x,
    "ties": lambda x: x.round() if x.is_floating_point() else x,
    "zeros": lambda x: _every(x, 3, 0) if x.is_floating_point() else x,
    "indices of -1": lambda x: _every(x, 2, -1) if x.dtype == torch.int64 else x,
}
