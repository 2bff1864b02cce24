"""`Program.explain` in detail: layouts, boxing with bytes and cause, parameters and memory, and how good deduction was.

Rows that differ only in the number of a repeated block stand once, with a count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.table import Table

from weft.boxing import EXCHANGES, BoxingStep, steps
from weft.boxing.halo import Halo
from weft.compiler.halos import graph_halos
from weft.compiler.pipeline import Compiled
from weft.compiler.stages.lay_out import Deduced
from weft.errors import UserError
from weft.ir.logical import Box, Call, Input, Location, LogicalGraph, Node, Update, Value
from weft.layout import Layout
from weft.patterns import covers
from weft.program.explain.beside import HALO, BoxTimes, exchange_tables
from weft.program.explain.kernels import bucket_tables
from weft.program.explain.memory import ProgramMemory
from weft.program.explain.schedule import schedule_tables, stage_table, time_notes
from weft.program.explain.tables import table, text_of
from weft.traces.events import stars
from weft.units import ITEM_SIZE, Seconds, bytes_text, seconds_text


def deduction_notes(deduced: Sequence[Deduced]) -> Iterator[str]:
    """Say if the layouts are proven cheapest, by the costs that deduction counts in."""
    for each in deduced:
        where = "layouts" if len(deduced) == 1 else f"layouts of stage {each.stage}"
        yield f"{where}: {_known(each)}"
        if each.broken:
            yield (
                f"{where}: {each.broken} uses of parameters depart from the strategy's layouts, because "
                "their ops admit nothing else"
            )


def _known(deduced: Deduced) -> str:
    if deduced.taken:
        return f"taken over from a batch of another shape, for which they were {_found(deduced)}"
    return _found(deduced)


def _found(deduced: Deduced) -> str:
    if deduced.proven:
        return "proven cheapest, parameters in shards as if whole, each axis with the others as they are"
    if deduced.bound <= 0:
        return "not proven cheapest, and no bound is known"
    over = deduced.cost / deduced.bound - 1
    return f"not proven cheapest; along the axis solved last at most {over:.2%} above the bound"


# Whether a node is wanted in a table.
_Chosen: TypeAlias = Callable[[Node], bool]


def details(compiled: Compiled, peaks: ProgramMemory, times: BoxTimes) -> str:
    """All tables as plain text; `peaks` is the memory of the ranks of this process, `times` those of one of them."""
    graph = compiled.graph
    title = f"{graph.name} on {', '.join(map(str, graph.placements))}"
    tables: tuple[Table, ...] = (_inputs(graph), _layouts(graph), _boxings(graph, times))
    tables += (*exchange_tables(graph), peaks.table())
    tables += bucket_tables(compiled.plan.ranks[0]) if compiled.plan.ranks else ()
    schedule = schedule_tables(compiled.schedule)
    stages = stage_table(graph, compiled.stages)
    notes = (*deduction_notes(compiled.deduced), *compiled.notes, *time_notes(graph))
    return text_of(title, *stages, *tables, *schedule, *notes)


def details_of(compiled: Compiled, pattern: str, times: BoxTimes) -> str:
    """The rows of inputs and ops that match a pattern, and of the boxing that they make or want.

    Raises:
        UserError: when nothing matches.
    """
    graph = compiled.graph
    found = {
        id(node) for node in graph.nodes if any(covers(pattern, name) for name in _names(node))
    }
    if not found:
        raise UserError(
            f"explain(op={pattern!r}): no op's module, line or name matches, and no name of an input; expected a "
            'pattern such as "blocks.0", "blocks.*.fc", "model.py:30", "aten.mm.*" or "head.weight"'
        )

    def chosen(node: Node) -> bool:
        if not isinstance(node, Box):
            return id(node) in found
        ends = (_source_node(graph, node.input.name), *_readers(graph, node))
        return any(id(end) in found for end in ends)

    parts = (_inputs(graph, chosen), _layouts(graph, chosen), _boxings(graph, times, chosen))
    return text_of(*(part for part in parts if part.row_count))


def _names(node: Node) -> Iterator[str]:
    """The names of a node that a pattern may match."""
    if isinstance(node, Input):
        yield node.key
    if isinstance(node, Call):
        yield node.op
        if node.location:
            where = node.location
            yield where.module
            line = f"{where.file}:{where.line}"
            yield line
            # From any folder on.
            yield from (line[at + 1 :] for at, letter in enumerate(line) if letter in "/\\")


def _readers(graph: LogicalGraph, node: Box) -> Iterator[Node]:
    """The nodes that read a boxing, by way of others too."""
    for reader in graph.users[node.output.name]:
        yield reader
        if isinstance(reader, Box):
            yield from _readers(graph, reader)
        if isinstance(reader, Update):
            yield graph.producers[reader.target.name]


def _every(node: Node) -> bool:
    return True


def _inputs(graph: LogicalGraph, chosen: _Chosen = _every) -> Table:
    inputs = graph.of_kind(Input)
    states = {node.value.name: _local(node.value) for node in inputs if node.role == "state"}
    of_target = {
        update.target.name: sum(states[ref.name] for ref in update.states)
        for update in graph.of_kind(Update)
    }
    rows = [
        (
            node.role,
            stars(node.key),
            _shape(node.value),
            _sbp(node.value),
            bytes_text(_local(node.value)),
            bytes_text(of_target.get(node.value.name, 0)) if states else "",
        )
        for node in inputs
        if node.role != "state" and chosen(node)
    ]
    columns = ("role", "name", "whole shape", "layout", "per rank", "states per rank")
    return table("inputs", columns, rows)


def _layouts(graph: LogicalGraph, chosen: _Chosen = _every) -> Table:
    rows = [
        (node.op, _shape(value), _sbp(value), _where(node.location))
        for node in graph.of_kind(Call)
        if chosen(node)
        for value in node.makes
    ]
    return table("layouts", ("op", "whole shape", "layout", "where"), rows)


def _boxings(graph: LogicalGraph, times: BoxTimes, chosen: _Chosen = _every) -> Table:
    loop = graph.loop
    boxes = [node for node in graph.of_kind(Box) if chosen(node)]
    rows = [_boxing_row(graph, node, loop) for node in boxes]
    fetched = tuple((halo, reader) for halo, reader in graph_halos(graph) if chosen(reader))
    moved = sum(_moved(graph, node, loop) for node in boxes)
    moved += sum(_fetched(graph, halo, loop) for halo, _ in fetched)
    rows += [_halo_row(graph, halo, reader, loop) for halo, reader in fetched]
    names = [*(node.output.name for node in boxes)]
    names += [halo.value.name + HALO for halo, _ in fetched]
    made = ("from", "to", "as", "bytes", "whole shape", "made by", "wanted by")
    columns = (*made, "predicted", "measured")
    return table("boxing", columns, _with_times(rows, names, times), total=moved)


def _with_times(
    rows: Sequence[tuple[str, ...]], names: Sequence[str], times: BoxTimes
) -> Iterator[tuple[str, ...]]:
    """The rows with the seconds that those that are equal take together, each of a value by its name."""
    alike: dict[tuple[str, ...], set[str]] = {}
    for row, name in zip(rows, names, strict=True):
        alike.setdefault(row, set()).add(name)
    for row in rows:
        yield *row, *(_seconds(found, alike[row]) for found in (times.predicted, times.measured))


def _seconds(found: Mapping[str, Seconds], names: Collection[str]) -> str:
    known = [found[name] for name in names if name in found]
    return seconds_text(Seconds(sum(known))) if known else ""


def _boxing_row(graph: LogicalGraph, node: Box, loop: frozenset[str]) -> tuple[str, ...]:
    source = graph.values[node.input.name]
    kinds = [step.kind for step in _steps(source, node)]
    there, here = _layout(source), _layout(node.output)
    across = there.placement != here.placement
    return (
        str(there) if across else _sbp(source),
        str(here) if across else _sbp(node.output),
        ", ".join(kinds) or "as it stands",
        bytes_text(_moved(graph, node, loop)),
        _shape(source),
        _maker(graph, node.input.name),
        stars(node.cause),
    )


def _halo_row(
    graph: LogicalGraph, halo: Halo, reader: Call, loop: frozenset[str]
) -> tuple[str, ...]:
    return (
        _sbp(halo.value),
        "with border rows",
        "halo",
        bytes_text(_fetched(graph, halo, loop)),
        _shape(halo.value),
        _maker(graph, halo.value.name),
        f"{reader.op} at {_where(reader.location)}",
    )


def _maker(graph: LogicalGraph, name: str) -> str:
    match _source_node(graph, name):
        case Input(role=role, key=key):
            return f"{role} {stars(key)}"
        case Call(op=op, location=location):
            return f"{op} at {_where(location)}"
    return name


def _source_node(graph: LogicalGraph, name: str) -> Node:
    """The node that makes a value, in whatever layout."""
    node = graph.producers[name]
    return _source_node(graph, node.input.name) if isinstance(node, Box) else node


def _steps(source: Value, node: Box) -> tuple[BoxingStep, ...]:
    itemsize = ITEM_SIZE[source.dtype]
    return steps(_layout(source), _layout(node.output), source.shape, itemsize)


def _moved(graph: LogicalGraph, node: Box, loop: frozenset[str]) -> int:
    """Bytes that a boxing moves in a step."""
    chain = _steps(graph.values[node.input.name], node)
    moved = sum(step.bytes for step in chain if step.kind in EXCHANGES)
    return moved * (graph.micro_batches if node.output.name in loop else 1)


def _fetched(graph: LogicalGraph, halo: Halo, loop: frozenset[str]) -> int:
    """Bytes that border rows move in a step."""
    return halo.total * (graph.micro_batches if halo.value.name in loop else 1)


def _where(location: Location | None) -> str:
    return stars(str(location)) if location else ""


def _shape(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _layout(value: Value) -> Layout:
    assert value.layout is not None
    return value.layout


def _sbp(value: Value) -> str:
    return f"({', '.join(map(str, _layout(value).sbp))})"


def _local(value: Value) -> int:
    layout = _layout(value)
    elements = 1
    for size in layout.local_shape(value.shape, layout.placement.ranks[0]):
        elements *= size
    return elements * ITEM_SIZE[value.dtype]
