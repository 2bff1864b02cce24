"""The kinds of memory that predicted and measured peaks are told apart by."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from weft.ir.plan import LocalValue, RegisterKind
from weft.units import ITEM_SIZE, Bytes

Kind: TypeAlias = Literal[
    "parameters",
    "buffers",
    "states",
    "batch",
    "constants",
    "gradients",
    "activations",
    "communication",
    "host",
]

KINDS: dict[RegisterKind, Kind] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "state": "states",
    "batch": "batch",
    "constant": "constants",
    "activation": "activations",
    "communication": "communication",
    "gradient": "gradients",
    "host": "host",
    "control": "activations",
}


def value_bytes(value: LocalValue) -> Bytes:
    """Size of a local tensor."""
    return Bytes(math.prod(value.shape) * ITEM_SIZE[value.dtype])
