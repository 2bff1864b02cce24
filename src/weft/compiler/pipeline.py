"""The whole way from a captured graph to a plan, one pass a line (docs/design.md, section 2).

`transform` needs no layouts, `lay` gives them, `lower` makes of them what ranks run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from weft.compiler.experts.dispatch import dispatch_rows
from weft.compiler.experts.unsorted import unsorted
from weft.compiler.families.joined_loss import join_losses
from weft.compiler.graph.apart import keep_apart
from weft.compiler.graph.causal_masks import causal_masks
from weft.compiler.graph.joined_products import join_products
from weft.compiler.graph.products_first import products_first
from weft.compiler.graph.rewriting import undo_views
from weft.compiler.graph.shares import store_in_shares
from weft.compiler.layouts.deduce import Hints
from weft.compiler.local.aliases import copy_escaping_views
from weft.compiler.local.communicators import communicators
from weft.compiler.local.localize import localize, localize_all
from weft.compiler.local.offload import offload
from weft.compiler.local.overlap import overlap
from weft.compiler.local.overlap_worth import BatchCut, best_cut, may_cut
from weft.compiler.memory.limit import check_limit
from weft.compiler.memory.walk import Peak, memory
from weft.compiler.microbatch.facts import on_cut_leaves
from weft.compiler.microbatch.split import split_time
from weft.compiler.microbatch.time_first import time_first
from weft.compiler.options import Options
from weft.compiler.schedule.fold import rank_classes
from weft.compiler.schedule.schedule import Scheduled, device_of, plan_alone, plan_together
from weft.compiler.signatures import check_signatures
from weft.compiler.stages.assign import assign_stages
from weft.compiler.stages.join import Deduced, GridHints, lay_out
from weft.compiler.stages.stages import Stages
from weft.compiler.training.activations import lay_activations
from weft.compiler.training.clip import clip_norm
from weft.compiler.training.exchange_dtypes import lay_exchanges
from weft.compiler.training.loss_scale import scale_loss, unscale
from weft.compiler.training.precision import lay_sums
from weft.compiler.training.recompute import recompute
from weft.compiler.training.zero import shard_variables
from weft.hardware import is_launched
from weft.ir import LogicalGraph, Plan, verify, verify_local
from weft.ir.plan import Communicator, LocalProgram
from weft.layout import Placement


@final
@dataclass(frozen=True)
class Compiled:
    """The results of the pipeline on its way, for `explain` and for the runtime.

    Attributes:
        graph: the logical graph with layouts and boxing.
        stages: where its stages run, and where its variables live.
        programs: the local programs of the ranks that were asked for.
        plan: their plans.
        fingerprint: equal on all ranks that compiled the same program.
        schedule: what was decided about time, for all ranks when they were planned together.
        deduced: how good the layouts of each stage are known to be.
        stored: for the key of each parameter that lies in shards but is used whole, the axis.
        notes: what a pass could not do as the strategy says, in words.
        peaks: what the ranks that were asked for hold when they hold most.
        cut: into how many parts the batch is cut for overlap.
    """

    graph: LogicalGraph
    stages: Stages
    programs: tuple[LocalProgram, ...]
    plan: Plan
    fingerprint: str
    schedule: Scheduled
    deduced: tuple[Deduced, ...]
    stored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    peaks: tuple[Peak, ...] = ()
    cut: BatchCut | None = None


@final
@dataclass(frozen=True)
class Laid:
    """The graph with a layout for every value, and what was settled on the way.

    Attributes:
        graph: with boxing.
        stages: where its stages run, and where its variables live.
        deduced: how good the layouts of each stage are known to be.
        stored: for the key of each parameter that lies in shards but is used whole, the axis.
        notes: what a pass could not do as the strategy says.
    """

    graph: LogicalGraph
    stages: Stages
    deduced: tuple[Deduced, ...]
    stored: Mapping[str, int]
    notes: tuple[str, ...]


@final
@dataclass(frozen=True)
class Lowered:
    """The programs and the plan that ranks run.

    Attributes:
        communicators: all of them.
        programs: of the ranks that were asked for, and of those that stand for others.
        schedule: their plans.
        cut: into how many parts the batch is cut for overlap.
    """

    communicators: tuple[Communicator, ...]
    programs: tuple[LocalProgram, ...]
    schedule: Scheduled
    cut: BatchCut


def compile_graph(
    graph: LogicalGraph,
    hints: Hints | GridHints,
    placement: Placement,
    ranks: Sequence[int],
    options: Options | None = None,
    homes: Mapping[str, int] | None = None,
    begin: Callable[[str], None] = lambda _: None,
    like: Compiled | None = None,
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
        begin: is told the name of each phase that begins.
        like: the same step for another shape of the batch, with the same options; what was chosen for it
            is taken over where sizes are close.
    """
    options = options or Options()
    begin("cutting into stages and micro-batches")
    graph, stages = transform(graph, placement, options, homes, like.stages if like else None)
    begin("choosing layouts")
    laid = lay(graph, hints, placement, stages, options, like.deduced if like else ())
    begin("planning")
    lowered = lower(laid, placement, ranks, options, like.cut if like else None)
    return _compiled(laid, lowered, ranks, options)


def transform(
    graph: LogicalGraph,
    placement: Placement,
    options: Options,
    homes: Mapping[str, int] | None,
    before: Stages | None = None,
) -> tuple[LogicalGraph, Stages]:
    """Rewrite the graph in all that does not depend on layouts: where calls run, how often, in which dtypes.

    `before` are the stages for another shape of the batch.
    """
    graph = verify(keep_apart(verify(graph)))
    graph = verify(products_first(graph))
    graph = verify(causal_masks(graph))
    graph = verify(unsorted(graph))
    graph = verify(join_products(graph))
    graph = verify(scale_loss(graph))
    calls = before.calls if before else {}
    graph, stages = assign_stages(graph, options, placement, homes, calls)
    graph = verify(lay_activations(verify(graph), options.activations, options.modules))
    graph = verify(undo_views(graph))
    graph = verify(recompute(graph, options.recompute, options.modules))
    graph = verify(lay_sums(graph, options.precision, options.micro_batches))
    graph = verify(split_time(graph, options.micro_batches, placement.device_type))
    return graph, stages


def lay(
    graph: LogicalGraph,
    hints: Hints | GridHints,
    placement: Placement,
    stages: Stages,
    options: Options,
    before: Sequence[Deduced] = (),
) -> Laid:
    """Layouts: what hints ask of the graph, deduction and boxing, the dtypes of exchanges.

    `before` is what was deduced for another shape of the batch.
    """
    by_axes = {placement.axes: hints} if isinstance(hints, Hints) else hints
    on_grids = {axes: on_cut_leaves(each, graph) for axes, each in by_axes.items()}
    graph = verify(store_in_shares(graph, on_grids, stages))
    graph = verify(time_first(graph, on_grids, stages))
    sent = dispatch_rows(graph, on_grids, stages, options.expert_capacity)
    sharded = shard_variables(verify(sent.graph), on_grids, options.zero, stages)
    graph = verify(unscale(sharded.graph))
    graph = verify(clip_norm(graph, options.clip_norm, options.metrics, stages.homes))
    graph, deduced = lay_out(graph, sharded.hints, stages, options.cost_model, before)
    graph = lay_exchanges(verify(graph, with_layouts=True), options.precision)
    graph = check_signatures(verify(graph, with_layouts=True))
    return Laid(graph, stages, deduced, sharded.stored, (*sharded.notes, *sent.notes))


def lower(
    laid: Laid,
    placement: Placement,
    ranks: Sequence[int],
    options: Options,
    before: BatchCut | None = None,
) -> Lowered:
    """Local programs and plans. With stages or micro-batches, of all ranks: of equal ones one stands for all.

    `before` is how another shape of the batch was cut.
    """
    graph, stages = laid.graph, laid.stages
    groups = communicators(graph)
    together = graph.micro_batches > 1 or len(stages.placements) > 1
    limited = options.memory_limit is not None
    classes = rank_classes(graph, groups, placement.ranks, limited) if together else {}
    every = sorted({*classes.values(), *ranks})
    local = localize_all(graph, every, groups, stages.homes)
    for each in local.values():
        verify_local(each)
    whole = before and before.weighed and before.parts == 1 and all(x.taken for x in laid.deduced)
    cut = BatchCut() if whole else _cut(graph, local, groups, placement, stages, options)
    programs = _after(lambda program: overlap(program, cut.parts), local.values())
    if not is_launched(placement.device_type):  # else a few rows at a time are too many launches
        programs = _after(join_losses, programs)
    programs = _after(copy_escaping_views, programs)
    modules = options.modules
    programs = _after(lambda each: offload(each, graph, options.offload, modules), programs)
    if together:
        schedule = plan_together(programs, groups, stages, options, classes)
    else:
        schedule = plan_alone(programs, groups, stages, options)
    return Lowered(groups, programs, schedule, cut)


def _after(
    pass_: Callable[[LocalProgram], LocalProgram], programs: Iterable[LocalProgram]
) -> tuple[LocalProgram, ...]:
    """The programs of all ranks after a pass."""
    return tuple(verify_local(pass_(program)) for program in programs)


def _compiled(laid: Laid, lowered: Lowered, ranks: Sequence[int], options: Options) -> Compiled:
    """The parts of the result that were asked for; raises where the plan takes more memory than there may be."""
    graph, schedule = laid.graph, lowered.schedule
    plans = {plan.rank: plan for plan in schedule.plans}
    own = tuple(program for program in lowered.programs if program.rank in ranks)
    plan = Plan(graph.name, lowered.communicators, tuple(plans[each.rank] for each in own))
    # Under a limit every rank looks at all that it knows, so that all give up alike.
    looked_at = plan.ranks if options.memory_limit is None else schedule.plans
    peaks = tuple(memory(each, schedule.moments(each.rank)) for each in looked_at)
    held = check_limit(peaks, graph, lowered.programs, options)
    said = f"{graph}{lowered.communicators}{options}{lowered.cut}"
    return Compiled(
        graph,
        laid.stages,
        own,
        plan,
        hashlib.sha256(said.encode()).hexdigest(),
        schedule,
        laid.deduced,
        laid.stored,
        (*laid.notes, *lowered.cut.notes),
        tuple(peak for peak in held if peak.rank in ranks),
        lowered.cut,
    )


def _cut(
    boxed: LogicalGraph,
    local: Mapping[int, LocalProgram],
    groups: tuple[Communicator, ...],
    placement: Placement,
    stages: Stages,
    options: Options,
) -> BatchCut:
    """Into how many parts the batch is cut: what the first rank finds best, all take."""
    if not may_cut(boxed, options):
        return BatchCut()
    first = min(placement.ranks)
    program = local.get(first) or localize(boxed, first, groups, stages.homes)
    return best_cut(program, groups, device_of(stages, options))
