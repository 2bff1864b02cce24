"""The schedule in `Program.explain`: stages and ranks, what runs where and comes in, notes on micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from weft.boxing import steps
from weft.compiler.context import Stages
from weft.compiler.decompositions.table import with_statistics
from weft.compiler.local.localize import node_phases
from weft.compiler.microbatch.facts import cut_leaves
from weft.compiler.schedule.schedule import Scheduled, bubble, busy, in_flight
from weft.compiler.stages.balance import call_cost
from weft.hardware import CostModel
from weft.ir.logical import Box, Call, Input, LogicalGraph, Output, runs_in_loop
from weft.ir.nodes import OVER_STEP, PhaseKind
from weft.program.explain.tables import table
from weft.units import ITEM_SIZE, bytes_text, seconds_text

_KINDS: tuple[PhaseKind, ...] = ("forward", "backward", "weight")
_COLUMNS = ("stage", "rank", "in flight", *_KINDS, "idle")


def schedule_tables(scheduled: Scheduled) -> tuple[Table, ...]:
    """The table, when stages or micro-batches were scheduled.

    Times are estimates from shapes: their proportions decide, not their size.
    """
    if scheduled.simulation is None:
        return ()
    rows = []
    for plan in scheduled.plans:
        work = busy(scheduled, plan.rank)
        for stage in sorted({phase.stage for phase in work}):
            times = {phase.kind: seconds for phase, seconds in work.items() if phase.stage == stage}
            row = (
                *(str(stage), str(plan.rank), str(in_flight(plan, stage))),
                *(seconds_text(times[kind]) if kind in times else "" for kind in _KINDS),
                f"{bubble(scheduled, plan.rank):.0%}",
            )
            rows.append(row)
    name = f"schedule: {scheduled.name}, {scheduled.plans[0].micro_batches} micro-batches"
    made = table(name, _COLUMNS, rows)
    made.caption = f"estimated {seconds_text(scheduled.simulation.makespan)} a step"
    made.caption_justify = "left"
    return (made,)


# As many modules of a stage are named.
NAMED = 12


def stage_table(graph: LogicalGraph, stages: Stages) -> Iterator[Table]:
    """A row for each stage; nothing for a program of one stage."""
    if len(stages.placements) == 1:
        return
    incoming, loop = _incoming(graph, stages), graph.loop
    # The cost of the calls of each stage in a step, on whole tensors.
    work, parameters = Counter[int](), Counter[int]()
    for call in graph.of_kind(Call):
        times = graph.micro_batches if runs_in_loop(call, loop) else 1
        work[call.phase.stage] += times * int(call_cost(call.first, CostModel()))
    for node in graph.of_kind(Input):
        if node.role == "parameter":
            parameters[stages.homes.get(node.key, 0)] += node.value.nbytes
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


def _incoming(graph: LogicalGraph, stages: Stages) -> Counter[int]:
    """Bytes that come to each stage from other ranks in a step."""
    loop, found = graph.loop, Counter[int]()
    phases = node_phases(graph, stages.homes)
    for node, phase in zip(graph.nodes, phases, strict=True):
        if isinstance(node, Box):
            value = graph.values[node.input.name]
            source, target = value.laid, node.output.laid
            for_caller = all(isinstance(one, Output) for one in graph.users[node.output.name])
            if source.placement != target.placement and not for_caller:
                chain = steps(source, target, value.shape, ITEM_SIZE[value.dtype])
                times = graph.micro_batches if node.output.name in loop else 1
                found[phase.stage] += times * sum(step.bytes for step in chain)
    return found


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


def time_notes(graph: LogicalGraph) -> Iterator[str]:
    """The cut of the batch in time, and the differences from a step of the whole batch."""
    if graph.micro_batches == 1:
        return
    leaves = [node for node in graph.of_kind(Input) if node.value.name in cut_leaves(graph)]
    loop, calls = graph.loop, graph.of_kind(Call)
    inside = sum(runs_in_loop(call, loop) for call in calls)
    names = ", ".join(node.key for node in leaves) or "nothing of the batch is cut"
    samples = leaves[0].value.shape[1] if leaves else 0
    yield (
        f"{graph.micro_batches} micro-batches of {samples} samples ({names}): {inside} calls run in "
        f"each, {len(calls) - inside} once a step"
    )
    yield from exceptions(graph)


def exceptions(graph: LogicalGraph) -> Iterator[str]:
    """The differences from a step of the whole batch."""
    if graph.micro_batches == 1:
        return
    loop, calls = graph.loop, graph.of_kind(Call)
    # By kind of statistics, the modules of which they differ between micro-batches.
    normalized: dict[str, dict[str, None]] = {}
    for call, statistics in with_statistics(calls):
        if call.location and runs_in_loop(call, loop):
            normalized.setdefault(statistics.name, {})[call.location.module or "the model"] = None
    for name, modules in normalized.items():
        yield (
            f"{name} sees micro-batches in {', '.join(modules)}: statistics of each, and a new version "
            "of the running ones from each, as when gradients are accumulated in PyTorch"
        )
    for call in barriers(graph):
        yield f"all micro-batches wait for one another in {call.op} at {call.location}"


def barriers(graph: LogicalGraph) -> tuple[Call, ...]:
    """The calls that make one value of all micro-batches for which a node of the loop waits."""
    loop = graph.loop
    causes: dict[str, frozenset[int]] = {}
    found: set[int] = set()
    for number, node in enumerate(graph.nodes):
        before = frozenset[int]().union(*(causes.get(use, frozenset()) for use in node.uses))
        if runs_in_loop(node, loop):
            found |= before
            joins = isinstance(node, Call) and node.op in OVER_STEP
            before = frozenset((number,)) if joins else frozenset()
        causes |= {value.name: before for value in node.makes}
    return tuple(
        node for i, node in enumerate(graph.nodes) if i in found and isinstance(node, Call)
    )
