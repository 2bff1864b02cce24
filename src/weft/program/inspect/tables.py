"""Tables as plain text: memory, buckets of collectives, kernels, CUDA graphs, how batches come to their steps."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import final

from rich.console import Console
from rich.table import Table

from weft.boxing import steps
from weft.compiler.context import Stages
from weft.compiler.decompositions.table import with_statistics
from weft.compiler.local.localize import node_phases
from weft.compiler.microbatch.facts import cut_leaves
from weft.compiler.schedule.draft import Bucket
from weft.compiler.schedule.schedule import Scheduled, bubble, busy, in_flight
from weft.compiler.stages.balance import call_cost
from weft.hardware import CostModel
from weft.ir.alias import Memory
from weft.ir.logical import Box, Call, Input, LogicalGraph, Output, runs_in_loop
from weft.ir.nodes import OVER_STEP, PhaseKind
from weft.ir.plan import Communicate, RankPlan
from weft.runtime.compiled.parts import Distinct
from weft.runtime.devices.cuda_graphs import GraphRunner
from weft.units import ITEM_SIZE, Bytes, bytes_text, counted, seconds_text

# Wide enough that no cell of a row is broken: one row, one line.
WIDTH = 400


def text_of(*parts: Table | str) -> str:
    """Tables and lines, one below the other."""
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True, force_terminal=False)
    for part in parts:
        console.print(part, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def table(
    title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]], total: int | None = None
) -> Table:
    """A table with a column `×` when rows repeat; `total`: bytes a step, for the line below it."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    counted = Counter(rows)
    several = any(count > 1 for count in counted.values())
    for column in (*(("×",) if several else ()), *columns):
        made.add_column(column, overflow="fold")
    for row, count in counted.items():
        made.add_row(*((str(count),) if several else ()), *row)
    if total is not None:
        made.caption = (
            f"{len(counted)} kinds, {counted.total()} boxings, {bytes_text(total)} a step"
        )
        made.caption_justify = "left"
    return made


KINDS = tuple(each.name for each in fields(Memory))


@final
@dataclass(frozen=True)
class RankMemory:
    """The peak of one rank: as the plan says it, by kind; and of tensors in the first step, None before it."""

    rank: int
    predicted: Memory
    measured: Memory | None


@final
@dataclass(frozen=True)
class ProgramMemory:
    """The peaks of the ranks of this process; prints as a table."""

    ranks: tuple[RankMemory, ...]

    def __iter__(self) -> Iterator[RankMemory]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RankMemory:
        """The memory of a rank, by its number.

        Raises:
            KeyError: for ranks that are not of this process.
        """
        return {each.rank: each for each in self.ranks}[rank]

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> Table:
        """A row for each rank and source."""
        rows = [
            (
                *(str(each.rank), source),
                *(bytes_text(getattr(memory, kind)) for kind in (*KINDS, "peak")),
            )
            for each in self.ranks
            for source, memory in (("predicted", each.predicted), ("measured", each.measured))
            if memory is not None
        ]
        return table(
            "memory at its peak, as the plan states it and as measured",
            ("rank", "", *KINDS, "peak"),
            rows,
        )


def bucket_tables(plan: RankPlan) -> tuple[Table, ...]:
    """The numbers of a rank's collectives and of the buckets that they run in; nothing when all run alone."""
    by_kind: dict[tuple[int, str], list[Bucket]] = {}
    for actor in plan.actors:
        if isinstance(actor, Communicate):
            first = actor.collectives[0]
            key = (first.communicator, first.kind)
            by_kind.setdefault(key, []).append(Bucket(actor.collectives))
    if all(len(bucket.collectives) == 1 for each in by_kind.values() for bucket in each):
        return ()
    rows = []
    for (communicator, kind), buckets in by_kind.items():
        sizes = sorted(sum(value.nbytes for value in bucket.makes) for bucket in buckets)
        number = sum(len(bucket.collectives) for bucket in buckets)
        least, most = (bytes_text(Bytes(size)) for size in (sizes[0], sizes[-1]))
        span = least if least == most else f"{least} to {most}"
        rows.append((str(communicator), kind, str(number), str(len(sizes)), span))
    columns = ("communicator", "kind", "collectives", "in buckets", "bytes of a bucket")
    return (table(f"buckets of rank {plan.rank}", columns, rows),)


def kernel_text(parts: Iterable[Distinct]) -> str:
    """A row for each distinct part: its calls, how often it is there, its seconds; none where all is ATen code."""

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.3f}"

    rows = []
    for one in parts:
        choice = one.choice
        ran = f"ATen ({choice.problem})" if choice.problem else "ATen"
        ran = ran if choice.compiled is None else "Inductor"
        rows.append((str(one.calls), str(one.times), ran, ms(choice.aten), ms(choice.inductor)))
    columns = ("calls", "times", "runs as", "ATen ms", "Inductor ms")
    return text_of("", table("kernels", columns, rows)) if rows else ""


def cuda_graphs_text(replayer: GraphRunner | None) -> str:
    """The segments that a rank replays, and why not the others; nothing if it could replay none."""
    if replayer is None:
        return ""
    replays = replayer.replays
    reasons = Counter({**replays.reasons, **replayer.stopped}.values())
    graphs = len(replayer.plan.replayed - replayer.stopped.keys())
    title = f"CUDA graphs of rank {replayer.plan.rank}"
    estimate = (
        f"{replays.launches} launches a step: {replays.host * 1e3:.2f} ms of the host, "
        f"{replays.device * 1e3:.2f} ms of the device (estimated); graphs spare {replays.saved}"
    )
    rows = [(str(graphs), "replayed"), *((str(count), why) for why, count in reasons.items())]
    return text_of("", table(title, ("segments", "how"), rows), estimate)


def loading_text(plan: RankPlan | None) -> str:
    """The plan of the last loop that loaded ahead, as text, and how much its registers hold; nothing of None."""
    if plan is None:
        return ""
    held = sum(each.credits * each.value.nbytes for each in plan.registers)
    # Registers of one actor have equal credits.
    credits = {each.producer: each.credits for each in plan.registers}
    ahead = counted(sum(credits.values()), "batch", "batches")
    return (
        f"loading ahead of the steps, by the last loop: {ahead}, {bytes_text(Bytes(held))} in registers at most, "
        f"beside the batch of the step\n{plan}"
    )


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
    loop, incoming = graph.loop, Counter[int]()
    phases = node_phases(graph, stages.homes)
    for node, phase in zip(graph.nodes, phases, strict=True):
        if isinstance(node, Box):
            value = graph.values[node.input.name]
            source, target = value.laid, node.output.laid
            for_caller = all(isinstance(one, Output) for one in graph.users[node.output.name])
            if source.placement != target.placement and not for_caller:
                chain = steps(source, target, value.shape, ITEM_SIZE[value.dtype])
                times = graph.micro_batches if node.output.name in loop else 1
                incoming[phase.stage] += times * sum(step.bytes for step in chain)
    return incoming


def _modules(graph: LogicalGraph, stage: int) -> str:
    stages_of: dict[str, set[int]] = {}
    for call in graph.of_kind(Call):
        path = call.location.module if call.location and call.phase.kind == "forward" else ""
        while path:
            stages_of.setdefault(path, set()).add(call.phase.stage)
            path = path.rpartition(".")[0]
    own = [path for path, where in stages_of.items() if where == {stage}]
    outer = [path for path in own if stages_of.get(path.rpartition(".")[0]) != {stage}]
    more = f" and {len(outer) - NAMED} more" if len(outer) > NAMED else ""
    return ", ".join(sorted(outer, key=list(stages_of).index)[:NAMED]) + more


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
    waited_for: set[int] = set()
    for number, node in enumerate(graph.nodes):
        before = frozenset[int]().union(*(causes.get(use, frozenset()) for use in node.uses))
        if runs_in_loop(node, loop):
            waited_for |= before
            joins = isinstance(node, Call) and node.op in OVER_STEP
            before = frozenset((number,)) if joins else frozenset()
        causes |= {value.name: before for value in node.makes}
    return tuple(
        node for i, node in enumerate(graph.nodes) if i in waited_for and isinstance(node, Call)
    )
