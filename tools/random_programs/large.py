"""Small programs as if they were large: what weft does with large tensors alone, it does with all."""

from __future__ import annotations

import math
from typing import Any

from weft.compiler.context import Context
from weft.compiler.decompositions import fused_losses
from weft.compiler.local import offload
from weft.compiler.local import overlap as overlap_worth
from weft.compiler.memory import act as memory_exchange
from weft.runtime.kernels import loss_ops as class_ops

BYTES = 48


def act_large() -> None:
    """From now on: buckets and slices of a few elements, steps cut into parts of their batch, blocks of few rows."""
    modules: dict[Any, dict[str, Any]] = {
        memory_exchange: {"SLICE": BYTES},
        Context: {"bucket_bytes": BYTES},
        overlap_worth: {"WORTH": math.inf},
        fused_losses: {"SMALLEST": 1},
        offload: {"SMALLEST": 1},
        class_ops: {"_AT_A_TIME": BYTES},
    }
    for module, limits in modules.items():
        for name, limit in limits.items():
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            setattr(module, name, limit)
