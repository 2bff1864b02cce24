"""The kinds of memory that predicted and measured peaks are told apart by, and what an act does to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Taken:
    """A storage that nobody but the act holds: the names under which it reads it, kind and bytes."""

    names: frozenset[str]
    kind: Kind
    bytes: int


# The most that an act takes beside what it reads and keeps, by kind, given what it may free on the
# way.
Extra: TypeAlias = Callable[[Collection[Taken]], Counter[Kind]]


@dataclass(frozen=True, slots=True)
class ActMemory:
    """What an act does to memory.

    Attributes:
        extra: what it takes beside what it reads and `kept`.
        live: the values that it has made when it takes most, with their bytes, given what it may
            free.
        fresh: the storages that it leaves: kind and bytes, by the name that they were made for.
        bases: for each register that it fills: a name in `fresh`, or what it reads and looks at.
        kept: those in `fresh` that are there from its first act of a step: what adds up over
            micro-batches.
    """

    extra: Extra = lambda taken: Counter()
    live: Callable[[Collection[Taken]], Mapping[str, int]] = lambda taken: {}
    fresh: Mapping[str, tuple[Kind, int]] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
