"""Plain, whole copies of what holds global tensors."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from weft.tensor.global_tensor import GlobalTensor


def whole(value: Any) -> Any:
    """The same with each global tensor as a plain copy of all of it; every process must call it.

    So code that knows nothing of weft takes what a live model holds, on any number of ranks.

    Args:
        value: a tensor, dicts, lists and tuples of such, or a module, of which it is a copy, without gradients. What
            is no global tensor stays as it is.
    """
    if not isinstance(value, nn.Module):
        return pytree.tree_map_only(GlobalTensor, GlobalTensor.full, value)
    copies: dict[int, Any] = {}
    for tensor in (*value.parameters(), *value.buffers()):
        if isinstance(tensor, GlobalTensor):
            plain = tensor.detach().full()  # type: ignore[attr-defined]
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = (
                nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain
            )
    return copy.deepcopy(value, copies)
