"""The blocks of a model that come again and again, and the calls of each in a captured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.ir.logical import Call, LogicalGraph


@final
@dataclass(frozen=True)
class Blocks:
    """Modules `<prefix>.0` to `<prefix>.<count - 1>`.

    Attributes:
        prefix: the path of what holds them.
        count: how many there are.
    """

    prefix: str
    count: int

    def path(self, number: int) -> str:
        """The path of one of them."""
        return f"{self.prefix}.{number}"

    def of(self, path: str) -> int | None:
        """The number of the block that a module or variable is in; None outside of all."""
        rest = path.removeprefix(f"{self.prefix}.")
        number = rest.partition(".")[0]
        inside = rest != path and number.isdecimal() and int(number) < self.count
        return int(number) if inside else None


def repeated_blocks(modules: Sequence[str]) -> Blocks | None:
    """The largest family of numbered modules, the outermost of equally large ones; None without two."""
    families: dict[str, set[int]] = {}
    for path in modules:
        prefix, _, last = path.rpartition(".")
        if prefix and last.isdecimal():
            families.setdefault(prefix, set()).add(int(last))
    whole = {prefix: len(own) for prefix, own in families.items() if own == set(range(len(own)))}
    if not whole:
        return None
    prefix = max(whole, key=lambda one: (whole[one], -one.count("."), one))
    return Blocks(prefix, whole[prefix]) if whole[prefix] > 1 else None


@final
@dataclass(frozen=True)
class Spans:
    """For each block the numbers of its nodes, in order: those of the forward, and those of the backward."""

    forward: tuple[range, ...]
    backward: tuple[range, ...]


def spans_of(graph: LogicalGraph, blocks: Blocks) -> Spans | None:
    """The nodes of each block: from its first to the first of the next; None where blocks are not one after another."""
    places: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for number, node in enumerate(graph.nodes):
        if isinstance(node, Call) and node.location is not None:
            block = blocks.of(node.location.module)
            if block is not None:
                places[node.phase.kind == "forward"].append((number, block))
    forward = _ranges(places[True], range(blocks.count))
    backward = _ranges(places[False], range(blocks.count)[::-1])
    if forward is None or (backward is None and places[False]):
        return None
    return Spans(forward, tuple(reversed(backward)) if backward else ())


def _ranges(places: Sequence[tuple[int, int]], order: Sequence[int]) -> tuple[range, ...] | None:
    """The stretches of the blocks in `order`."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, block in places:
        first.setdefault(block, number)
        last[block] = number
    if set(first) != set(order):
        return None
    begins = [first[block] for block in order]
    ends = [*begins[1:], last[order[-1]] + 1]
    fits = all(
        begin <= last[block] < end for begin, end, block in zip(begins, ends, order, strict=True)
    )
    return tuple(map(range, begins, ends)) if fits else None


def ops_in(graph: LogicalGraph, span: range) -> tuple[str, ...]:
    """The ops of a stretch of nodes, in order; nodes that are no calls have none."""
    nodes = (graph.nodes[number] for number in span)
    return tuple([node.op if isinstance(node, Call) else "" for node in nodes])
