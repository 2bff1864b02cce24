"""What becomes of ops that have no sharding rule: torch's own decomposition into ops that have one, where there is any.

An op without a rule and without a decomposition stays; it runs whole when it is a plain function (`weft.ops.whole`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from weft.capture.decompositions import Decompositions
from weft.ops import has_rule

# Their decompositions write memory by strides, draw random numbers, or are longer than what they stand for.
_KEPT = ("as_strided", "empty", "resize", "_fft")


def fallback() -> Decompositions:
    """Decompositions of the ops that no rule knows; rules that users declare are looked up anew each time."""
    return {op: function for op, function in _core().items() if not has_rule(str(op))}


@cache
def _core() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    return {
        op: function
        for op, function in core_aten_decompositions().items()
        if isinstance(op, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not any(word in op.name() for word in _KEPT)
    }
