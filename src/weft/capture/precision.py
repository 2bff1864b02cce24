"""Mixed precision: autocast, casts of parameters, and a mark where the gradient of the loss starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from weft.errors import CaptureError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class Casts:
    """The dtype of the forward: "bf16", "fp16", or None for the model's own.

    Attributes:
        compute: of matrix products and convolutions, by autocast.
        parameters: of every floating-point parameter, and of what the model is called with.
    """

    compute: str | None = None
    parameters: str | None = None
    device: str = "cpu"

    @property
    def scaled(self) -> bool:
        """True where gradients are so small in the dtype that the loss has to be scaled."""
        return "fp16" in (self.compute, self.parameters)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that stands for a parameter in the forward."""
        cast: torch.Tensor = _cast(tensor, self.parameters)
        return cast

    @contextmanager
    def around(self, model: torch.nn.Module) -> Iterator[None]:
        """The forward of `model` while this lasts: under autocast, of arguments that are cast."""

        def cast(_: Any, args: Any, kwargs: Any) -> Any:
            return pytree.tree_map(lambda leaf: _cast(leaf, self.parameters), (args, kwargs))

        hook = None
        if self.parameters is not None:
            hook = model.register_forward_pre_hook(cast, with_kwargs=True)
        try:
            with autocast(self.compute, self.device):
                yield
        finally:
            if hook is not None:
                hook.remove()


def _cast(leaf: Any, to: str | None) -> Any:
    if to is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(_DTYPES[to])


def autocast(precision: str | None, device_type: str) -> AbstractContextManager[Any]:
    """While this lasts, torch casts the operands of matrix products and convolutions down.

    Raises:
        CaptureError: when the precision is unknown.
    """
    if precision is None:
        return nullcontext()
    if precision not in _DTYPES:
        raise CaptureError(f"precision={precision!r} is unknown; expected 'bf16', 'fp16' or None")
    return torch.autocast(device_type, dtype=_DTYPES[precision])


def loss_seed(loss: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss by itself: ones, marked for the pass that puts a loss scale there."""
    seed: torch.Tensor = torch.ops.weft.loss_seed(loss)
    return seed


@torch.library.custom_op("weft::loss_seed", mutates_args=(), schema="(Tensor loss) -> Tensor")
def _loss_seed(loss: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(loss)


@_loss_seed.register_fake
def _(loss: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(loss)
