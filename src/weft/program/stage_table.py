"""What `Program.explain` says about stages: what runs where, how much of the work it is, and what comes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from rich.table import Table

from weft.boxing import steps
from weft.compiler.phases import node_phases
from weft.compiler.signatures import layout_of
from weft.compiler.stages import Stages
from weft.compiler.stages_even import call_cost
from weft.hardware import CostModel
from weft.ir.logical import Box, Call, Input, LogicalGraph, Output, runs_in_loop
from weft.program.tables import table
from weft.units import ITEM_SIZE, bytes_text

# As many modules of a stage are named.
NAMED = 12


def stage_table(graph: LogicalGraph, stages: Stages) -> Iterator[Table]:
    """A row for each stage; nothing for a program of one stage."""
    if len(stages.placements) == 1:
        return
    work, incoming = _work(graph), _incoming(graph, stages)
    parameters = Counter[int]()
    for node in graph.of_kind(Input):
        if node.role == "parameter":
            size = prod(node.value.shape) * ITEM_SIZE[node.value.dtype]
            parameters[stages.homes.get(node.key, 0)] += size
    rows = [
        (
            str(stage),
            str(placement),
            _modules(graph, stage),
            bytes_text(parameters[stage]),
            f"{100 * work[stage] / (work.total() or 1):.0f} %",
            bytes_text(incoming[stage]),
        )
        for stage, placement in enumerate(stages.placements)
    ]
    columns = ("stage", "runs on", "modules", "parameters", "of the work", "comes in a step")
    yield table("stages", columns, rows)


def _work(graph: LogicalGraph) -> Counter[int]:
    """What the calls of each stage cost in a step, on whole tensors."""
    loop, found = graph.loop, Counter[int]()
    for call in graph.of_kind(Call):
        times = graph.micro_batches if runs_in_loop(call, loop) else 1
        found[call.phase.stage] += times * int(call_cost(graph, call, CostModel()))
    return found


def _incoming(graph: LogicalGraph, stages: Stages) -> Counter[int]:
    """Bytes that come to each stage from other ranks in a step."""
    loop, found = graph.loop, Counter[int]()
    phases = node_phases(graph, stages.homes)
    for node, phase in zip(graph.nodes, phases, strict=True):
        if isinstance(node, Box):
            value = graph.values[node.input.name]
            source, target = layout_of(value), layout_of(node.output)
            if source.placement != target.placement and not _handed_out(graph, node):
                chain = steps(source, target, value.shape, ITEM_SIZE[value.dtype])
                times = graph.micro_batches if node.output.name in loop else 1
                found[phase.stage] += times * sum(step.bytes for step in chain)
    return found


def _handed_out(graph: LogicalGraph, node: Box) -> bool:
    """Whether only the caller reads a boxing."""
    return all(isinstance(reader, Output) for reader in graph.users[node.output.name])


def _modules(graph: LogicalGraph, stage: int) -> str:
    """The outermost modules whose forward is all in a stage."""
    found: dict[str, set[int]] = {}
    for call in graph.of_kind(Call):
        path = call.location.module if call.location and call.phase.kind == "forward" else ""
        while path:
            found.setdefault(path, set()).add(call.phase.stage)
            path = path.rpartition(".")[0]
    own = [path for path, where in found.items() if where == {stage}]
    outer = [path for path in own if found.get(path.rpartition(".")[0]) != {stage}]
    more = f" and {len(outer) - NAMED} more" if len(outer) > NAMED else ""
    return ", ".join(sorted(outer, key=list(found).index)[:NAMED]) + more
