"""The structure of the loss function's result: where the loss is, and how to build the same containers again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from weft.capture.batch import is_constant, leaves_of
from weft.capture.numbers.symbolic import is_symbolic, number_now
from weft.capture.numbers.unbacked import is_unbacked, tensor_of
from weft.capture.tree import Static, Tree, unflatten
from weft.errors import CaptureError

_RETURN_HELP = "return the loss, a tuple or list whose first entry is the loss, or a dict with the entry 'loss'"


@final
@dataclass(frozen=True, slots=True)
class Number:
    """A leaf that is a number of Python, read from the tensor with this key."""

    key: str


@final
@dataclass(frozen=True)
class OutputSpec:
    """Containers and leaves of the returned value; a leaf is the key of a tensor, or a constant handed back as is."""

    tree: Tree
    leaves: tuple[str | Number | Static, ...]

    def check_loaded(self) -> None:
        """Raise BatchError where a leaf of the batch is returned of which this process has not all rows."""
        for leaf in self.leaves:
            if isinstance(leaf, Static) and is_symbolic(leaf.value):
                repr(number_now(leaf.value))

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """Build what the loss function returned from the tensors by key."""
        return unflatten([_given(leaf, values) for leaf in self.leaves], self.tree)


def _given(leaf: str | Number | Static, values: Mapping[str, Any]) -> Any:
    match leaf:
        case Static():
            return number_now(leaf.value)
        case Number(key=key):
            return values[key].item()
    return values[leaf]


def describe_outputs(
    result: Any, loss: torch.Tensor | None
) -> tuple[OutputSpec, dict[str, torch.Tensor]]:
    """The structure of `result`, and its tensors by key; the key of `loss` is "loss".

    An object that is neither tensor nor constant, such as the cache in what a model of
    `transformers` returns, is handed back as None.

    Raises:
        CaptureError: when all that is returned is such an object.
    """
    found, tree = leaves_of(result, "output")
    tensors: dict[str, torch.Tensor] = {}
    leaves: list[str | Number | Static] = []
    for path, leaf in found:
        if is_unbacked(leaf):
            tensors[path] = tensor_of(leaf)
            leaves.append(Number(path))
        elif isinstance(leaf, torch.Tensor):
            key = "loss" if leaf is loss else path
            tensors[key] = leaf
            leaves.append(key)
        else:
            leaves.append(Static(path, _plain(path, leaf)))
    return OutputSpec(tree, tuple(leaves)), tensors


def find_loss(result: Any) -> torch.Tensor:
    """The loss in what the loss function returned: a float tensor of one element that requires grad.

    Raises:
        CaptureError: when there is none.
    """
    loss = None if is_unbacked(result) else _candidate(result)
    if is_unbacked(result) or is_unbacked(loss):
        raise CaptureError(
            "the loss is a number, as .item() or float() makes it, through which no gradient flows; return the tensor, "
            "and the number beside it"
        )
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"the loss function returned {_kind(result)} and no loss was found in it; {_RETURN_HELP}"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss has the shape {list(loss.shape)}; expected a single number: reduce it with .mean() or .sum()"
        )
    if not loss.is_floating_point():
        raise CaptureError(f"the loss is {loss.dtype}; expected a floating-point number")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not require grad: no trainable parameter leads to it (detached, under torch.no_grad, "
            "or all parameters are frozen); leave one that leads to it trainable, or compile with optimizer=None"
        )
    return loss


def _candidate(result: Any) -> Any:
    if isinstance(result, Mapping):
        return result.get("loss")
    if isinstance(result, tuple | list):
        return result[0] if result else None
    return getattr(result, "loss", result)


def _plain(path: str, leaf: Any) -> Any:
    if is_symbolic(leaf) or is_constant(leaf):
        return leaf
    if path != "output":
        return None  # beside others, as a cache in what a model returns
    raise CaptureError(f"the loss function returned {_kind(leaf)}; {_RETURN_HELP}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
