"""Units of a rank's memory: bytes by kind, as a plan foresees them and a run measures them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, final

from weft.ir.plan_nodes import LocalValue, RegisterKind
from weft.units import ITEM_SIZE, NO_BYTES, Bytes

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


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at the moment when it holds most.

    `gradients` are what updates read, `communication` what collectives make and the buffers that
    they work with, `activations` everything else that comes and goes.
    """

    parameters: Bytes = NO_BYTES
    buffers: Bytes = NO_BYTES
    states: Bytes = NO_BYTES
    batch: Bytes = NO_BYTES
    constants: Bytes = NO_BYTES
    gradients: Bytes = NO_BYTES
    activations: Bytes = NO_BYTES
    communication: Bytes = NO_BYTES

    @property
    def peak(self) -> Bytes:
        """All kinds together."""
        return Bytes(sum(getattr(self, each.name) for each in fields(self)))

    @staticmethod
    def of(sizes: Mapping[Kind, int]) -> Memory:
        """From sizes by kind; what lies on the host does not count."""
        return Memory(**{kind: Bytes(size) for kind, size in sizes.items() if kind != "host"})
