"""What the rows of `test_passes.py` are made of: steps up to a pass, and texts of what has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, TypeAlias

from contexts import NOTHING, hinted
from drafts import drafted, planned
from weft.compiler.assignment import Assignment
from weft.compiler.context import Context, Options
from weft.compiler.hints import Hints
from weft.compiler.layouts.box import box, deduce, describe
from weft.compiler.local.localize import communicators, localize
from weft.compiler.passes import ProgramPass
from weft.compiler.plans.specialize import with_cuda_graphs
from weft.compiler.schedule.actor_graph import ActorGraph, with_copies
from weft.compiler.schedule.bucket import bucket
from weft.compiler.schedule.credits import preset_slots
from weft.compiler.schedule.draft import Bucket, PlanDraft, PlanPass, Schedule
from weft.compiler.schedule.presets import Preset
from weft.compiler.schedule.priorities import prioritise
from weft.compiler.schedule.segment import segment
from weft.compiler.stages.choose import assign_stages, choose_stages
from weft.compiler.training.shards import choose_shards, shard_variables
from weft.hardware import default_device
from weft.ir import LogicalGraph
from weft.ir.forms import actor_text, local_text, part_text
from weft.ir.logical import Input
from weft.ir.plan import Actor, LocalProgram, RankPlan, Register
from weft.layout import SBP, Layout, Placement, placement
from weft.strategy.parts import Zero

PAIR = placement("cpu", [0, 1])
# Of graphs with two stages, the variables that do not live in the first.
HOMES = {"v": 1}
ONE_F_ONE_B = Preset("1f1b", stages=2, around=2, micro_batches=2)

Parts: TypeAlias = tuple[object, ...]


def on(where: Placement, **inputs: tuple[SBP, ...]) -> Context:
    """Layouts of inputs in one stage."""
    return hinted(where, inputs)


def staged(graph: LogicalGraph, options: Options) -> list[object]:
    """A graph with stages on two ranks, and where variables live."""
    context = choose_stages(graph, Context(PAIR, options))
    homes = context.stages.homes.items()
    return [
        assign_stages(graph, context),
        *(f'"{key}" in stage {stage}' for key, stage in homes),
    ]


def sharded(graph: LogicalGraph, level: Literal[1, 2, 3]) -> list[object]:
    """A graph whose variables are stored in shards by ZeRO, and how they lie."""
    context = choose_shards(graph, hinted(PAIR, zero=Zero(level)))
    stored = context.hints[PAIR.axes].inputs.items()
    return [
        shard_variables(graph, context),
        *(f'"{key}" in {_sbps_text(sbps)}' for key, sbps in stored),
    ]


def deduced(graph: LogicalGraph, **inputs: tuple[SBP, ...]) -> Assignment:
    """Layouts on two ranks, of which those of some inputs are given."""
    return deduce(graph, Hints(inputs), PAIR)


def boxed(graph: LogicalGraph, **inputs: tuple[SBP, ...]) -> Parts:
    """The layouts of a graph, and the graph with boxing."""
    found = deduced(graph, **inputs)
    return assignment_text(graph, found), box(graph, found)


def before_boxing(
    graph: LogicalGraph,
    pass_: Callable[[LogicalGraph, Assignment], tuple[LogicalGraph, Assignment]],
    **inputs: tuple[SBP, ...],
) -> Parts:
    """The boxed graph without and with a pass on graphs and their layouts."""
    found = deduced(graph, **inputs)
    return box(graph, found), box(*pass_(graph, found))


def assignment_text(graph: LogicalGraph, found: Assignment) -> str:
    """How each node reads its operands, and lays out what it makes."""
    lines = []
    for number, node in enumerate(graph.nodes):
        what = f'{node.role} "{node.key}"' if isinstance(node, Input) else describe(node, graph)
        reads = ", ".join(map(_sbp_text, found.operands.get(number, ())))
        made = ", ".join(
            f"%{value.name} {_sbp_text(found.values[value.name])}" for value in node.makes
        )
        lines.append(what + (f": {reads}" if reads else "") + (f" -> {made}" if made else ""))
    return "\n".join(lines)


def _sbp_text(layout: Layout) -> str:
    return _sbps_text(layout.sbp)


def _sbps_text(sbps: Iterable[SBP | None]) -> str:
    return " ".join(map(str, sbps))


def local(graph: LogicalGraph, rank: int = 0) -> LocalProgram:
    """The program of a rank."""
    return localize(graph, rank, communicators(graph), HOMES)


def on_program(graph: LogicalGraph, pass_: ProgramPass, context: Context = NOTHING) -> Parts:
    """The program of the first rank, before and after a pass."""
    program = local(graph)
    return program, pass_(program, replace(context, graph=graph))


def buckets(graph: LogicalGraph) -> Schedule:
    """The schedule of the first rank."""
    return drafted(local(graph), bucket).schedule


def segmented(graph: LogicalGraph, *passes: PlanPass, rank: int = 0) -> PlanDraft:
    """The draft of a rank with actors, after some more passes; rank 1 runs the second of two stages, with ZeRO 3."""
    rule, groups = ONE_F_ONE_B if rank else None, communicators(graph)
    given = {"staged": rank > 0, "zero": Zero(3), "groups": groups, "rule": rule}
    return drafted(local(graph, rank), bucket, segment, *passes, **given)  # type: ignore[arg-type]


def actors(graph: LogicalGraph, *passes: PlanPass, rank: int = 0) -> str:
    """The actors of a rank after some passes, and registers by which they wait for one another."""
    draft = segmented(graph, *passes, rank=rank)
    return actors_text(draft.actors, draft.controls)


def on_plans(graph: LogicalGraph, pass_: Callable[[RankPlan], object]) -> Parts:
    """The plan of the first rank, before and after a pass."""
    plan = planned(local(graph), groups=communicators(graph))
    return plan, pass_(plan)


def replayed(graph: LogicalGraph, plan: RankPlan) -> RankPlan:
    """The plan with marks on segments that are replayed wherever they can be."""
    return with_cuda_graphs(plan, local(graph), default_device("cuda"), "always", lambda op: None)[
        0
    ]


def with_copies_of_1f1b(graph: LogicalGraph) -> Parts:
    """The registers of the first of two stages, before and after."""
    groups, rule = communicators(graph), ONE_F_ONE_B
    plans = [
        planned(local(graph, rank), prioritise, staged=True, groups=groups, rule=rule)
        for rank in (0, 1)
    ]
    actor_graph = ActorGraph(tuple(plans), {})
    return registers_text(plans[0]), registers_text(
        with_copies(plans[0], preset_slots(actor_graph, ONE_F_ONE_B))
    )


def schedule_text(schedule: Schedule) -> str:
    """Nodes and buckets in order."""
    lines = []
    for item in schedule:
        if isinstance(item, Bucket):
            lines += ["bucket", *(f"  {local_text(part)}" for part in item.collectives)]
        else:
            lines.append(local_text(item))
    return "\n".join(lines)


def actors_text(actors: Iterable[Actor], controls: Iterable[Register] = ()) -> str:
    """The actors of a rank, and registers by which they wait for one another."""
    return "\n".join((*map(actor_text, actors), *map(part_text, controls)))


def registers_text(plan: RankPlan) -> str:
    """The registers of a plan."""
    return "\n".join(map(part_text, plan.registers))
