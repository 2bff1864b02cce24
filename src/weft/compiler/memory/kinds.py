"""The effect of an act of a plan on memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

from weft.ir.alias import Kind
from weft.units import Bytes


@final
@dataclass(frozen=True, slots=True)
class Taken:
    """A storage that nobody but the act holds: the names under which it reads it, kind and bytes."""

    names: frozenset[str]
    kind: Kind
    bytes: Bytes


# The most that an act takes beside what it reads and keeps, by kind, given what it may free on the
# way.
Extra: TypeAlias = Callable[[Collection[Taken]], Counter[Kind]]


@final
@dataclass(frozen=True, slots=True)
class ActMemory:
    """The effect of an act on memory.

    Attributes:
        extra: what it takes beside what it reads and `kept`.
        live: the values that it has made when it takes most, with their bytes, given what it may
            free.
        fresh: the storages that it leaves: kind and bytes, by the name that they were made for.
        bases: for each register that it fills: a name in `fresh`, or what it reads and looks at.
        kept: those in `fresh` that are there from its first act of a step: what adds up over
            micro-batches.
        under: of those in `fresh` that may be copies or views, what they would look at: it stays as long as they do.
    """

    extra: Extra = lambda taken: Counter()
    live: Callable[[Collection[Taken]], Mapping[str, Bytes]] = lambda taken: {}
    fresh: Mapping[str, tuple[Kind, Bytes]] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    under: Mapping[str, str] = field(default_factory=dict)
