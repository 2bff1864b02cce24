"""Variables in shares, put in order for what reads them otherwise, and back for what updates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from weft.compiler.context import Stages
from weft.compiler.graph.joined.blocks import RESHAPE
from weft.compiler.graph.joined.ends import CAT, SLICE
from weft.ir.logical import (
    Arg,
    Call,
    Input,
    LogicalGraph,
    Node,
    Output,
    Phase,
    Ref,
    Update,
    Value,
    node_uses,
)
from weft.ir.renamed import renamed
from weft.layout import Shares


def in_order(graph: LogicalGraph, stored: Mapping[str, Shares], stages: Stages) -> LogicalGraph:
    """The graph with variables put in order for what reads them, and in shares for what updates them."""
    inputs = [
        replace(n, shares=stored[n.value.name]) if n.value.name in stored else n
        for n in graph.of_kind(Input)
    ]
    readers = (node for node in graph.nodes if isinstance(node, Call | Output))
    # States that only their update reads have no values before the first one.
    read = {name for node in readers for name in node_uses(node)} & stored.keys()
    calls: list[Node] = []
    names: dict[str, str] = {}
    for node in inputs:
        if node.value.name in read:
            phase = Phase(stages.homes.get(node.key, 0), "forward")
            whole = replace(node.value, name=f"{node.value.name}.in_order")
            calls += _moved(node.value, whole, stored[node.value.name], phase, back=True)
            names[node.value.name] = whole.name
    keys = {node.value.name: node.key for node in inputs}
    ends: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, Update) and node.target.name in stored:
            source = graph.values[node.source.name]
            shared = replace(source, name=f"{source.name}.in_shares{len(ends)}")
            maker = graph.producers[source.name]
            home = Phase(stages.homes.get(keys[node.target.name], 0), "forward")
            phase = maker.phase if isinstance(maker, Call) else home
            calls += _moved(source, shared, stored[node.target.name], phase, back=False)
            ends.append(replace(node, source=Ref(shared.name)))
        elif isinstance(node, Update | Output):
            ends.append(renamed(node, names))
        elif isinstance(node, Call):
            calls.append(
                renamed(node, names) if not names.keys().isdisjoint(node_uses(node)) else node
            )
    return replace(graph, nodes=(*inputs, *calls, *ends))


def _moved(source: Value, made: Value, shares: Shares, phase: Phase, back: bool) -> Iterator[Call]:
    """Put a variable in order (`back`), or in shares."""
    dim, blocks = shares.dim, shares.blocks

    def call(op: str, args: tuple[Arg, ...], name: str, shape: tuple[int, ...]) -> Call:
        value = replace(source, name=name, shape=shape) if name != made.name else made
        return Call(op, args, (), (value,), None, phase)

    def with_size(*sizes: int) -> tuple[int, ...]:
        return (*source.shape[:dim], *sizes, *source.shape[dim + 1 :])

    whole, pieces = source.name, []
    if back:
        yield call(
            RESHAPE,
            (Ref(whole), shares.in_blocks(source.shape)),
            f"{made.name}.blocks",
            shares.in_blocks(source.shape),
        )
        whole = f"{made.name}.blocks"
    start = 0
    for number, part in enumerate(shares.parts):
        piece, turned = f"{made.name}.part{number}", f"{made.name}.part{number}.turned"
        cut, length = (dim + 1, part // blocks) if back else (dim, part)
        shapes = with_size(blocks, part // blocks), with_size(part)
        before, after = shapes if back else shapes[::-1]
        yield call(SLICE, (Ref(whole), cut, start, start + length), piece, before)
        yield call(RESHAPE, (Ref(piece), after), turned, after)
        start += length
        pieces.append(Ref(turned))
    if back:
        yield call(CAT, (tuple(pieces), dim), made.name, made.shape)
        return
    blocked = f"{made.name}.blocks"
    yield call(CAT, (tuple(pieces), dim + 1), blocked, shares.in_blocks(source.shape))
    yield call(RESHAPE, (Ref(blocked), made.shape), made.name, made.shape)
