"""A call of an op that has not been captured: on tensors of given shapes, as `weft ops` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from weft.errors import UserError, WeftError
from weft.ops.call import OpCall, Operand, TensorSpec
from weft.ops.cost import dtype_name
from weft.runtime.kernels.generated import local_function

# Elements of an example.
_MOST = 1 << 26


def call_like(op: str, arguments: Sequence[Any]) -> OpCall:
    """A call of `op`, with the results that it gives on zeros in place of each `TensorSpec`.

    Raises:
        UserError: when torch has no such op, or it does not take these arguments.
    """
    specs = [one for one in arguments if isinstance(one, TensorSpec)]
    _check_sizes(specs)
    numbers = iter(range(len(specs)))
    try:
        given = iter([torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in specs])
        values = [next(given) if isinstance(one, TensorSpec) else one for one in arguments]
        found = local_function(op)(*values)
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError, WeftError) as error:
        # torch's errors may go on for pages of frames.
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{op} does not run on these arguments: {why}; give those of a call that torch runs"
        ) from None
    results = found if isinstance(found, (tuple, list)) else (found,)
    args = tuple(
        Operand(next(numbers)) if isinstance(one, TensorSpec) else one for one in arguments
    )
    return OpCall(op, args, (), tuple(specs), tuple(map(_spec, results)))


def _check_sizes(specs: Sequence[TensorSpec]) -> None:
    """Refuse shapes that would fill the memory: what is legal shows on small ones too."""
    for spec in specs:
        if all(isinstance(size, int) for size in spec.shape) and prod(spec.shape) > _MOST:
            raise UserError(
                f"{spec.dtype}{list(spec.shape)} has more than {_MOST} elements; the call is made, so give smaller "
                "shapes that divide as these do"
            )


def _spec(result: Any) -> TensorSpec | None:
    if not isinstance(result, torch.Tensor):
        return None
    return TensorSpec(tuple(result.shape), dtype_name(result.dtype))
