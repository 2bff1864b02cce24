"""The whole way from a captured graph to a plan, one pass a line (docs/design.md, section 2)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.compiler.aliases import copy_escaping_views
from weft.compiler.bucket import bucket
from weft.compiler.clip import clip_norm
from weft.compiler.communicators import communicators
from weft.compiler.credit import credit
from weft.compiler.deduce import Hints
from weft.compiler.localize import localize
from weft.compiler.memory import Peak, memory
from weft.compiler.memory_limit import check_limit
from weft.compiler.microbatch import split_time
from weft.compiler.microbatch_leaves import on_cut_leaves
from weft.compiler.options import Options, check_supported
from weft.compiler.recompute import recompute
from weft.compiler.segment import segment
from weft.compiler.signatures import check_signatures
from weft.compiler.stages import Stages
from weft.compiler.stages_assign import assign_stages
from weft.compiler.stages_join import GridHints, lay_out
from weft.compiler.zero import shard_variables
from weft.ir import LogicalGraph, Plan, RankPlan, verify
from weft.ir.plan import Communicator, LocalProgram
from weft.ir.verify_plan import verify_communicators
from weft.layout import Placement


@dataclass(frozen=True)
class Compiled:
    """What the pipeline made on the way, for `explain` and for the runtime.

    Attributes:
        graph: the logical graph with layouts and boxing.
        stages: where its stages run, and where its variables live.
        programs: the local programs of the ranks that were asked for.
        plan: their plans.
        fingerprint: equal on all ranks that compiled the same program.
        stored: for the key of each parameter that lies in shards but is used whole, the axis.
        notes: what a pass could not do as the strategy says, in words.
        peaks: what the ranks that were asked for hold when they hold most.
    """

    graph: LogicalGraph
    stages: Stages
    programs: tuple[LocalProgram, ...]
    plan: Plan
    fingerprint: str
    stored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    peaks: tuple[Peak, ...] = ()


def compile_graph(
    graph: LogicalGraph,
    hints: Hints | GridHints,
    placement: Placement,
    ranks: Sequence[int],
    options: Options | None = None,
    homes: Mapping[str, int] | None = None,
) -> Compiled:
    """Compile a captured graph for some ranks of a placement.

    Every rank that calls this with the same arguments gets a part of the same plan.

    Args:
        graph: the step, as captured.
        hints: what the user fixed; where stages have grids of several numbers of axes, for each.
        placement: all ranks.
        ranks: those to make plans for.
        options: what the passes are told.
        homes: stages of parameters and buffers, where another program has decided them.
    """
    options = options or Options()
    check_supported(options)
    graph, stages = assign_stages(verify(graph), options, placement, homes)
    graph = verify(recompute(graph, options.recompute))
    graph = verify(split_time(graph, options.micro_batches, placement.device_type))
    by_axes = {placement.axes: hints} if isinstance(hints, Hints) else hints
    on_grids = {axes: on_cut_leaves(each, graph) for axes, each in by_axes.items()}
    sharded = shard_variables(graph, on_grids, options.zero, stages)
    graph = verify(clip_norm(sharded.graph, options.clip_norm))
    laid = lay_out(graph, sharded.hints, stages, options.cost_model)
    boxed = check_signatures(verify(laid, with_layouts=True))
    groups = communicators(boxed)
    local = (localize(boxed, rank, groups, stages.homes) for rank in ranks)
    programs = tuple(map(copy_escaping_views, local))
    plans = tuple(_rank_plan(program, groups, options) for program in programs)
    peaks = check_limit(tuple(map(memory, plans)), boxed, options)
    plan = Plan(graph.name, groups, plans)
    fingerprint = hashlib.sha256(f"{boxed}{groups}{options}".encode()).hexdigest()
    return Compiled(boxed, stages, programs, plan, fingerprint, sharded.stored, sharded.notes, peaks)


def _rank_plan(
    program: LocalProgram, groups: tuple[Communicator, ...], options: Options
) -> RankPlan:
    schedule = bucket(program, options.bucket_bytes)
    # After bucketing: a segment ends where a whole bucket can start, not at each of its parts.
    actors = segment(program, schedule, groups)
    plan = credit(program, actors)
    verify_communicators(plan, groups)
    return plan
