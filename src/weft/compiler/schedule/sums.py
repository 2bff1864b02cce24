"""The sums over micro-batches of what a communication brings, which only the end of the step waits for.

All ranks of a communicator find the same ones, also those without elements of a value (`op_on_all_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from weft.ir.nodes import OVER_STEP
from weft.ir.plan import LocalCall, LocalUpdate, LocalValue
from weft.ops.localize import BLANK


class _Item(Protocol):
    """A node of a local program, or several that run as one."""

    @property
    def reads(self) -> frozenset[str]: ...
    @property
    def makes(self) -> tuple[LocalValue, ...]: ...


def sums_of_communicated(items: Sequence[_Item]) -> frozenset[str]:
    """Communicated values that only become a sum over micro-batches, what calls make of one of them, and the sum."""
    readers: dict[str, list[_Item]] = {}
    for item in items:
        for name in item.reads:
            readers.setdefault(name, []).append(item)
    communicated = (each for each in items if not isinstance(each, LocalCall | LocalUpdate))
    names = (value.name for each in communicated for value in each.makes)
    return frozenset(made for name in names for made in _way_to_sum(name, readers))


def _way_to_sum(name: str, readers: Mapping[str, list[_Item]]) -> Iterator[str]:
    """The values from a communicated one to its sum over micro-batches; none where anything else reads one of them."""
    way = [name]
    while len(found := readers.get(name, [])) == 1:
        reader = found[0]
        if not isinstance(reader, LocalCall) or len(reader.reads) != 1 or len(reader.makes) != 1:
            return
        name = reader.makes[0].name
        way.append(name)
        if op_on_all_ranks(reader) in OVER_STEP:
            yield from way
            return


def op_on_all_ranks(call: LocalCall) -> object:
    """The op, on a rank without elements that of the other ranks."""
    return call.args[2] if call.op == BLANK else call.op
