"""Give a tensor object another content, so that all who hold the object see it.

Private API: `torch._C._swap_tensor_impl`, `Tensor._use_count`. `torch.utils.swap_tensors` does the
same, but refuses tensors that are referred to weakly, as recurrent layers refer to their weights;
these references are to the object, which stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.errors import UserError


def check_unused(tensor: Tensor, name: str) -> None:
    """Check that no graph of autograd needs the values of a tensor, so that it can be swapped.

    Raises:
        UserError: naming the tensor.
    """
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    # A graph that has run backward still ends in what adds the gradient up.
    if uses > (2 if tensor.requires_grad else 1):
        raise UserError(
            f"{name} cannot be taken over, as a graph of autograd needs its values: let the losses and outputs of "
            "earlier calls of the model go (del loss), or run their backward, first"
        )


def swap(one: Tensor, other: Tensor) -> None:
    """Exchange class, attributes and data of two tensors.

    Args:
        one: of the user, unused. A graph of autograd that ends in it cannot run backward again.
        other: nobody else has it.
    """
    if one._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(one).node.register_prehook(_too_late)
    exchange(one, other)


def exchange(one: Tensor, other: Tensor) -> None:
    """The same for a while, until they are exchanged again: graphs of autograd keep what they have."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _too_late(gradients: object) -> None:
    raise UserError(
        "backward() of a loss from before weft.compile took the model over; call the model again for a new loss"
    )
