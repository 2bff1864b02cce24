"""The reference as another order of summation may give it: whatever is added up is off by roundings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Parts of the names of ops that add up, or multiply many numbers.
_WORDS = (
    *("sum", "mean", "std", "var", "norm", "softmax", "pool", "prod", "loss", "cdist", "bag"),
    *("mm", "mv", "dot", "matmul", "linear", "conv", "attention", "fft", "linalg", "scatter_add"),
    *("index_add", "dense_backward", "lstm", "gru", "rnn", "upsample", "sampler"),
)


class Rounded(TorchDispatchMode):
    """While this lasts, every number that an op adds up is off by up to a rounding unit, drawn from `seed`.

    Numbers that are equal stay equal to ops that compare or move them, as they do on every rank; they
    do not where they are sums.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.overloadpacket.__name__ for word in _WORDS):
            given = zip(func._schema.arguments, args, strict=False)
            args = [
                each if _written(argument) else tree_map_only(Tensor, self._off, each)
                for argument, each in given
            ]
        return func(*args, **(kwargs or {}))

    def _off(self, x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        drawn = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        # Two units, as half of one could round back to the number itself.
        return x * (1 + 2 * torch.finfo(x.dtype).eps * drawn).to(x.real.dtype)


def _written(argument: Any) -> bool:
    """True where an op may write to an argument; those of `native_batch_norm` do not say so."""
    return bool(argument.alias_info) or argument.name.startswith("running_")
