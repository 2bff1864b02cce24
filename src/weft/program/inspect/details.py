"""`Program.explain` in detail: layouts, boxing with bytes, seconds and cause, parameters, memory, bounds of deduction.

Rows that differ only in the number of a repeated block stand once, with a count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias, final

from rich.table import Table

from weft.boxing import EXCHANGES, steps
from weft.compiler.pipeline import Compiled
from weft.compiler.signatures import graph_halos
from weft.compiler.stages.lay_out import Deduced
from weft.errors import UserError
from weft.ir.logical import Box, Call, Input, Location, LogicalGraph, Node, Update, Value
from weft.ir.plan import Communicate, Exchange, RankPlan, Transfer
from weft.patterns import covers
from weft.planning.exchanges import exchanges
from weft.program.inspect.tables import (
    ProgramMemory,
    bucket_tables,
    schedule_tables,
    stage_table,
    table,
    text_of,
    time_notes,
)
from weft.runtime.recording import Record
from weft.simulator.simulation import Simulation
from weft.traces.events import stars
from weft.units import ITEM_SIZE, Seconds, bytes_text, seconds_text

HALO = ".halo"


@final
@dataclass(frozen=True)
class BoxTimes:
    """Seconds of a step that a rank communicates for each boxing, by the name of the value that it makes.

    Boxings in one message share its seconds in proportion to their bytes. Measured seconds are from the last step, with
    the wait for other ranks; there are none before the first step.
    """

    predicted: Mapping[str, Seconds] = field(default_factory=dict)
    measured: Mapping[str, Seconds] = field(default_factory=dict)


def step_line(predicted: Simulation, record: Record, waited: Seconds | None = None) -> str:
    """The seconds of a step, as predicted and as the last one took, and for which that had waited for its batch."""
    about = " (about: figures are missing)" if predicted.estimates else ""
    text = f"step: {seconds_text(predicted.step_seconds)} predicted{about}"
    if not record.steps:
        return f"{text}, none measured yet"
    last = record.steps[-1]
    took = f"{seconds_text(Seconds((last.end - last.begin) / 1e9))} measured, the last one"
    data = "" if waited is None else f", which waited {seconds_text(waited)} for its batch"
    return f"{text}, {took}{data}"


def box_times(
    compiled: Compiled, plan: RankPlan, predicted: Simulation, record: Record
) -> BoxTimes:
    """The seconds of boxing on one rank; `record`: what the rank recorded of the last one."""
    boxes = {node.input.name: node.output.name for node in compiled.graph.of_kind(Box)}
    boxes |= {name: name for name in boxes.values()}
    # For each communicating actor, the boxings that it runs, and their shares of its bytes.
    shares: dict[int, list[tuple[str, float]]] = {}
    for actor in plan.actors:
        if isinstance(actor, Communicate):
            total, even = sum(x.bytes for x in actor.collectives), 1 / len(actor.collectives)
            shares[actor.id] = [
                (_box_of(each, boxes), each.bytes / total if total else even)
                for each in actor.collectives
            ]

    def shared(acts: Iterable[tuple[int, float]]) -> dict[str, Seconds]:
        taken = defaultdict[str, float](float)
        for actor, seconds in acts:
            for name, share in shares.get(actor, ()):
                taken[name] += share * seconds
        return {name: Seconds(seconds) for name, seconds in taken.items()}

    stands = compiled.schedule.classes.get(plan.rank, predicted.ranks[0].rank)
    own = next(trace for trace in predicted.traces if trace.rank == stands)
    last = record.steps[-1].step if record.steps else None
    ran = ((act.actor, (end - begin) / 1e9) for act, begin, end in record.spans if act.step == last)
    return BoxTimes(
        shared((int(s.details["actor"]), (s.end - s.begin) / 1e9) for s in own.slices), shared(ran)
    )


def _box_of(exchange: Exchange, boxes: Mapping[str, str]) -> str:
    made = exchange.output if exchange.output is not None else exchange.input
    assert made is not None  # one side at least is here
    name = made.name
    if isinstance(exchange, Transfer) and HALO in name:
        return name.partition(HALO)[0] + HALO
    while name not in boxes and "." in name:
        name = name.rpartition(".")[0]
    return boxes.get(name, name)


def deduction_notes(deduced: Sequence[Deduced]) -> Iterator[str]:
    """Say if the layouts are proven cheapest, by the costs that deduction counts in."""
    for each in deduced:
        where = "layouts" if len(deduced) == 1 else f"layouts of stage {each.stage}"
        if each.assignment.proven:
            text = "proven cheapest, sharded parameters treated as whole, each axis with the others fixed"
        elif each.assignment.bound <= 0:
            text = "not proven cheapest, and no bound is known"
        else:
            over = each.assignment.cost / each.assignment.bound - 1
            text = f"not proven cheapest; along the axis solved last at most {over:.2%} above the bound"
        taken = "reused from a batch of another shape, for which they were " if each.taken else ""
        yield f"{where}: {taken}{text}"
        if each.assignment.broken:
            yield (
                f"{where}: {each.assignment.broken} uses of parameters differ from the strategy's layouts, because "
                "their ops allow no other"
            )


# True if a node is wanted in a table.
_Chosen: TypeAlias = Callable[[Node], bool]


def details(compiled: Compiled, peaks: ProgramMemory, times: BoxTimes) -> str:
    """All tables as plain text; `peaks` is the memory of the ranks of this process, `times` those of one of them."""
    graph = compiled.graph
    title = f"{graph.name} on {', '.join(map(str, graph.placements))}"
    tables: tuple[Table, ...] = (_inputs(graph), _layouts(graph), _boxings(graph, times))
    # A row for each kind of exchange and dtype, with the bytes of all ranks.
    sent = Counter[tuple[str, str]]()
    for each in exchanges(compiled):
        for step in each.sent:
            sent[step.kind, each.dtype] += step.bytes * each.times
        if each.halo is not None:
            sent["halo", each.dtype] += each.bytes
    if sent:
        rows = [(kind, dtype, bytes_text(size)) for (kind, dtype), size in sorted(sent.items())]
        tables += (table("exchanges of a step", ("as", "dtype", "bytes"), rows),)
    tables += (peaks.table(),)
    tables += bucket_tables(compiled.plan.ranks[0]) if compiled.plan.ranks else ()
    schedule = schedule_tables(compiled.schedule)
    stages = stage_table(graph, compiled.stages)
    notes = (*deduction_notes(compiled.deduced), *compiled.notes, *time_notes(graph))
    return text_of(title, *stages, *tables, *schedule, *notes)


def details_of(compiled: Compiled, pattern: str, times: BoxTimes) -> str:
    """The rows of inputs and ops that match a pattern, and of boxing that they make or want; UserError for no match."""
    graph = compiled.graph
    matching = {
        id(node) for node in graph.nodes if any(covers(pattern, name) for name in _names(node))
    }
    if not matching:
        raise UserError(
            f"explain(op={pattern!r}): no op's module, line or name matches, and no name of an input; expected a "
            'pattern such as "blocks.0", "blocks.*.fc", "model.py:30", "aten.mm.*" or "head.weight"'
        )

    def chosen(node: Node) -> bool:
        if not isinstance(node, Box):
            return id(node) in matching
        ends = (_source_node(graph, node.input.name), *_readers(graph, node))
        return any(id(end) in matching for end in ends)

    parts = (_inputs(graph, chosen), _layouts(graph, chosen), _boxings(graph, times, chosen))
    return text_of(*(part for part in parts if part.row_count))


def _names(node: Node) -> Iterator[str]:
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
    for reader in graph.users[node.output.name]:
        yield reader
        if isinstance(reader, Box):
            yield from _readers(graph, reader)
        if isinstance(reader, Update):
            yield graph.producers[reader.target.name]


def _inputs(graph: LogicalGraph, chosen: _Chosen = lambda _: True) -> Table:
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


def _layouts(graph: LogicalGraph, chosen: _Chosen = lambda _: True) -> Table:
    rows = [
        (node.op, _shape(value), _sbp(value), _where(node.location))
        for node in graph.of_kind(Call)
        if chosen(node)
        for value in node.makes
    ]
    return table("layouts", ("op", "whole shape", "layout", "where"), rows)


def _boxings(graph: LogicalGraph, times: BoxTimes, chosen: _Chosen = lambda _: True) -> Table:
    boxings = list(_boxing_rows(graph, chosen))
    # Equal rows become one, with the bytes and seconds of all.
    alike: dict[tuple[str, ...], set[str]] = {}
    for name, _, row in boxings:
        alike.setdefault(row, set()).add(name)

    def seconds(known: Mapping[str, Seconds], names: Collection[str]) -> str:
        taken = [known[name] for name in names if name in known]
        return seconds_text(Seconds(sum(taken))) if taken else ""

    rows = [
        (*row, *(seconds(each, alike[row]) for each in (times.predicted, times.measured)))
        for *_, row in boxings
    ]
    made = ("from", "to", "as", "bytes", "whole shape", "made by", "wanted by")
    columns = (*made, "predicted", "measured")
    return table("boxing", columns, rows, total=sum(moved for _, moved, _ in boxings))


def _boxing_rows(
    graph: LogicalGraph, chosen: _Chosen
) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """The name, the bytes of a step, and the row of each boxing and of all border rows."""
    loop = graph.loop
    for node in filter(chosen, graph.of_kind(Box)):
        source = graph.values[node.input.name]
        there, here = source.laid, node.output.laid
        chain = steps(there, here, source.shape, ITEM_SIZE[source.dtype])
        times = graph.micro_batches if node.output.name in loop else 1
        moved = times * sum(step.bytes for step in chain if step.kind in EXCHANGES)
        across = there.placement != here.placement
        row = (
            str(there) if across else _sbp(source),
            str(here) if across else _sbp(node.output),
            ", ".join(step.kind for step in chain) or "as it stands",
            bytes_text(moved),
            _shape(source),
            _maker(graph, node.input.name),
            stars(node.cause),
        )
        yield node.output.name, moved, row
    for halo, reader in graph_halos(graph):
        if chosen(reader):
            moved = halo.total * (graph.micro_batches if halo.value.name in loop else 1)
            row = (
                _sbp(halo.value),
                "with border rows",
                "halo",
                bytes_text(moved),
                _shape(halo.value),
                _maker(graph, halo.value.name),
                f"{reader.op} at {_where(reader.location)}",
            )
            yield halo.value.name + HALO, moved, row


def _maker(graph: LogicalGraph, name: str) -> str:
    match _source_node(graph, name):
        case Input(role=role, key=key):
            return f"{role} {stars(key)}"
        case Call(op=op, location=location):
            return f"{op} at {_where(location)}"
    return name


def _source_node(graph: LogicalGraph, name: str) -> Node:
    node = graph.producers[name]
    return _source_node(graph, node.input.name) if isinstance(node, Box) else node


def _where(location: Location | None) -> str:
    return stars(str(location)) if location else ""


def _shape(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _sbp(value: Value) -> str:
    return f"({', '.join(map(str, value.laid.sbp))})"


def _local(value: Value) -> int:
    layout = value.laid
    shape = layout.local_shape(value.shape, layout.placement.ranks[0])
    return prod(shape) * ITEM_SIZE[value.dtype]
