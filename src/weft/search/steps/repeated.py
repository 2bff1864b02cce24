"""The blocks of a model that come again and again, and the calls of each in a captured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.errors import InternalError
from weft.ir import verify
from weft.ir.arguments import with_names
from weft.ir.logical import Call, Input, LogicalGraph, Node, Output, Ref, Update
from weft.planning.stored_step import StoredStep


@final
@dataclass(frozen=True)
class Blocks:
    """Modules `<prefix>.0` to `<prefix>.<count - 1>`."""

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


def unit_of(blocks: Blocks | None, path: str) -> str | None:
    """The path of the block that a module or variable is in; None outside of all."""
    number = None if blocks is None else blocks.of(path)
    return None if blocks is None or number is None else blocks.path(number)


def starred_path(blocks: Blocks | None, path: str) -> str:
    """A path with a star in place of the number of its block: the same place in every block; itself outside of all."""
    unit = unit_of(blocks, path)
    return path if blocks is None or unit is None else f"{blocks.prefix}.*{path.removeprefix(unit)}"


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
    """The nodes of each block: from its first to the first of the next; None if blocks are not one after another."""
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
    """The ops of a stretch of nodes, in order; nodes that are not calls have none."""
    nodes = (graph.nodes[number] for number in span)
    return tuple([node.op if isinstance(node, Call) else "" for node in nodes])


def with_fewer_blocks(step: StoredStep, count: int) -> StoredStep | None:
    """The step with so many of its blocks; None if blocks differ, or read each other in other ways."""
    blocks = repeated_blocks(step.modules)
    spans = blocks and spans_of(step.graph, blocks)
    if not blocks or not spans or not 3 <= count < blocks.count:
        return None
    # The first and the last two stay: what surrounds all blocks may stand among the calls of the ends.
    gone = range(count - 2, blocks.count - 2)
    renamed = _renamed(step.graph, spans, gone)
    if renamed is None:
        return None
    graph = _without(step.graph, blocks, spans, gone, renamed)
    if graph is None:
        return None
    try:
        verify(graph)
    except InternalError:  # something reads of a block that is left out what nothing stands for
        return None
    modules = tuple(path for path in step.modules if blocks.of(path) not in gone)
    return replace(step, graph=graph, modules=modules)


def _renamed(graph: LogicalGraph, spans: Spans, gone: range) -> dict[str, str] | None:
    """For each value of the last block left out, by the way of data, the one that stands for it."""
    pairs = [(spans.forward[gone[-1]], spans.forward[gone[0] - 1])]
    if spans.backward:
        pairs.append((spans.backward[gone[0]], spans.backward[gone[-1] + 1]))
    found: dict[str, str] = {}
    for old, new in pairs:
        # The first block and the last one may have calls of what surrounds them, at their ends.
        if ops_in(graph, old) != ops_in(graph, new)[: len(old)]:
            return None
        for one, other in zip(old, new, strict=False):
            made = zip(graph.nodes[one].makes, graph.nodes[other].makes, strict=True)
            found |= {value.name: same.name for value, same in made}
    return found


def _without(
    graph: LogicalGraph, blocks: Blocks, spans: Spans, gone: range, renamed: dict[str, str]
) -> LogicalGraph | None:
    """The graph without the calls and variables of some blocks; None if an update reads what they made."""
    left_out = {number for block in gone for number in spans.forward[block]}
    if spans.backward:
        left_out |= {number for block in gone for number in spans.backward[block]}

    def stays(number: int, node: Node) -> bool:
        if isinstance(node, Update):
            return blocks.of(keys.get(node.target.name, "")) not in gone
        if isinstance(node, Input):
            return node.role == "batch" or blocks.of(node.key) not in gone
        return number not in left_out

    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    nodes = [node for number, node in enumerate(graph.nodes) if stays(number, node)]
    made = {value.name for node in nodes for value in node.makes}
    names = {name: other for name, other in renamed.items() if name not in made}
    read = [_reading(node, names) for node in nodes]
    whole = [node for node in read if node is not None]
    return graph.with_nodes(whole) if len(whole) == len(read) else None


def _reading(node: Node, names: dict[str, str]) -> Node | None:
    if names.keys().isdisjoint(node.uses):
        return node
    if isinstance(node, Call):
        return with_names(node, names)
    if isinstance(node, Output):
        return replace(node, value=Ref(names.get(node.value.name, node.value.name)))
    return None
