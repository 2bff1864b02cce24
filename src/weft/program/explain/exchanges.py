"""Exchanges in `Program.explain`: each with its group, by what it is for, and bytes by kind and dtype."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

from rich.table import Table

from weft.boxing import EXCHANGES, steps
from weft.compiler.halos import graph_halos
from weft.compiler.pipeline import Compiled
from weft.ir.logical import Box, LogicalGraph
from weft.ir.plan import Communicate
from weft.ir.queries.op_calls import layout_of
from weft.planning.exchanges import Exchanged, exchanges
from weft.program.explain.tables import table
from weft.units import ITEM_SIZE, bytes_text, counted

# As many exchanges are named one by one.
DEAREST = 3


def exchange_lines(compiled: Compiled) -> Iterator[str]:
    """The exchanges of a rank in a step, a line for each group, and the dearest of them."""
    graph = compiled.graph
    every = tuple(exchanges(compiled))
    ranks = len({rank for placement in graph.placements for rank in placement.ranks})
    if not every:
        yield "sent: nothing"
        return
    total = sum(each.bytes for each in every)
    number = _number(every, ranks)
    yield (
        f"sent by a rank in a step, on average: {bytes_text(total // ranks)} in "
        f"{number} {'exchange' if number == '1' else 'exchanges'}{_messages(compiled)}"
    )
    for group, members in _sorted(every, "group"):
        size = sum(each.bytes for each in members) // ranks
        kinds = Counter[str]()
        for each in members:
            for kind in each.kinds:
                kinds[kind] += each.times * each.ranks
        run = ", ".join(f"{kind} ×{_rounded(n, ranks)}" for kind, n in kinds.items())
        yield f"  {group}: {bytes_text(size)} ({run})"
    yield "dearest exchanges, and how much of what is sent:"
    for text, members in _sorted(every, "text")[:DEAREST]:
        size = sum(each.bytes for each in members)
        yield f"  {100 * size / total:.0f} %: {text}"


def _messages(compiled: Compiled) -> str:
    """As how many messages the exchanges of a rank of this process run, where small ones are joined."""
    plan = compiled.plan.ranks[0]
    joined = [actor for actor in plan.actors if isinstance(actor, Communicate)]
    if all(len(actor.collectives) == 1 for actor in joined):
        return ""
    messages = counted(sum(actor.acts for actor in joined), "message")
    return f", which rank {plan.rank} joins into {messages}"


def _sorted(
    every: Iterable[Exchanged], name: Literal["group", "text"]
) -> list[tuple[str, list[Exchanged]]]:
    """Exchanges joined by an attribute, what sends most first."""
    found = defaultdict[str, list[Exchanged]](list)
    for each in every:
        found[getattr(each, name)].append(each)
    return sorted(found.items(), key=lambda item: -sum(each.bytes for each in item[1]))


def _number(every: Iterable[Exchanged], ranks: int) -> str:
    return _rounded(sum(len(each.kinds) * each.times * each.ranks for each in every), ranks)


def _rounded(total: int, ranks: int) -> str:
    """A mean over the ranks; in tenths where it is no whole number."""
    return f"{total // ranks}" if total % ranks == 0 else f"{total / ranks:.1f}"


def exchange_tables(graph: LogicalGraph) -> tuple[Table, ...]:
    """A row for each kind of exchange and dtype; none where nothing is exchanged."""
    moved = sorted(exchanged(graph).items())
    rows = [(kind, dtype, bytes_text(size)) for (kind, dtype), size in moved]
    columns = ("as", "dtype", "bytes")
    return (table("exchanges of a step", columns, rows),) if rows else ()


def exchanged(graph: LogicalGraph) -> Counter[tuple[str, str]]:
    """Bytes that all ranks together send in a step, by kind ("all_gather", "halo") and dtype."""
    loop, found = graph.loop, Counter[tuple[str, str]]()

    def times(name: str) -> int:
        return graph.micro_batches if name in loop else 1

    for node in graph.of_kind(Box):
        value, target = graph.values[node.input.name], layout_of(node.output)
        for step in steps(layout_of(value), target, value.shape, ITEM_SIZE[value.dtype]):
            if step.kind in EXCHANGES and step.bytes:
                found[step.kind, value.dtype] += step.bytes * times(node.output.name)
    for halo, _ in graph_halos(graph):
        found["halo", halo.value.dtype] += halo.total * times(halo.value.name)
    return found
