"""The whole way from a captured graph to a plan: tables of passes, one pass per line (docs/design.md, section 2).

`TRANSFORM` needs no layouts, `LAY` says what hints ask of the graph; `lay_out` gives layouts; `lower` makes local
programs, `ON_RANKS` rewrites them, `plan_ranks` makes plans of them by `PLAN`. `compiler/passes.py` defines a pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import final

from weft.cached import cached_property
from weft.compiler.context import Context, Options, Stages
from weft.compiler.decompositions.fused_losses import join_losses
from weft.compiler.experts.dispatch import dispatch_rows
from weft.compiler.experts.mixtures import note_mixtures
from weft.compiler.experts.remove_sorts import remove_sorts
from weft.compiler.graph.causal_masks import causal_masks
from weft.compiler.graph.joined_products import join_products
from weft.compiler.graph.products_first import products_first
from weft.compiler.graph.rewriting import undo_views
from weft.compiler.graph.shares import store_in_shares
from weft.compiler.graph.unmerged_dims import keep_unmerged
from weft.compiler.hints import GridHints, Hints
from weft.compiler.local.localize import communicators, families, localize, localize_all
from weft.compiler.local.offload import copy_escaping_views, offload
from weft.compiler.local.overlap import BatchCut, best_cut, may_cut, overlap
from weft.compiler.memory.limit import check_limit
from weft.compiler.memory.walk import Peak, memory
from weft.compiler.microbatch.facts import on_cut_leaves
from weft.compiler.microbatch.sequence_first import sequence_first
from weft.compiler.microbatch.split import split_time
from weft.compiler.pass_cache import PassCache
from weft.compiler.passes import Decision, GraphPass, ProgramPass, run_on_graph, run_on_programs
from weft.compiler.schedule.bucket import bucket
from weft.compiler.schedule.credits import give_credits
from weft.compiler.schedule.draft import PlanPass
from weft.compiler.schedule.equal_ranks.rank_classes import rank_classes
from weft.compiler.schedule.priorities import order_gathers, prefetch, prioritise
from weft.compiler.schedule.schedule import Scheduled, plan_ranks
from weft.compiler.schedule.segment import segment
from weft.compiler.signatures import check_signatures
from weft.compiler.stages.choose import assign_stages, choose_stages
from weft.compiler.stages.lay_out import Deduced, lay_out
from weft.compiler.training.activations import lay_activations
from weft.compiler.training.gradients import clip_norm, scale_loss, unscale
from weft.compiler.training.precision import lay_exchanges, lay_sums
from weft.compiler.training.recompute import recompute
from weft.compiler.training.shards import choose_shards, shard_variables
from weft.errors import UserError
from weft.ir import LogicalGraph, Plan
from weft.ir.plan import Communicator, LocalProgram
from weft.layout import Placement


@final
@dataclass(frozen=True)
class Compiled:
    """The intermediate results of the pipeline, for `explain` and for the runtime.

    Attributes:
        options: of the passes.
        schedule: the decisions about time, for all ranks if they were planned together.
        deduced: the layouts of each stage, with cost and bound.
        stored: for the key of each parameter that is sharded but is used whole, the axis.
        notes: texts on what a pass could not do as the strategy asks.
        cut: the number of parts of the batch for overlap.
        families: for each communicator, those that run the same exchange at the same time.
        limited: peaks of these ranks, if there is a memory limit.
    """

    graph: LogicalGraph
    stages: Stages
    programs: tuple[LocalProgram, ...]
    plan: Plan
    options: Options
    schedule: Scheduled
    deduced: tuple[Deduced, ...]
    stored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cut: BatchCut | None = None
    families: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    limited: tuple[Peak, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal on all ranks that compiled the same program."""
        said = f"{self.graph}{self.plan.communicators}{self.options}{self.cut}"
        return hashlib.sha256(said.encode()).hexdigest()

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The memory of the ranks that were asked for when they hold most, found on first use.

        A simulation of the step on a machine finds the memory in its own order of time.
        """
        schedule = self.schedule
        return self.limited or tuple(
            memory(plan, schedule.moments(plan.rank)) for plan in self.plan.ranks
        )


# Passes that need no layouts: where calls run, how often, in which dtypes.
TRANSFORM: tuple[GraphPass | Decision, ...] = (
    # Reads views and batched products in the forms that capture gives them, so before all that rewrites them.
    keep_unmerged,
    # Before join_products: sums of products stand by themselves then, without a residual between their terms.
    products_first,
    causal_masks,
    # Before stages are chosen: the sort that goes is one call for all rows, the proof reads the whole step.
    remove_sorts,
    join_products,
    # Before stages are chosen: the scale is a state, which needs a home; its calls need a stage.
    scale_loss,
    Decision(choose_stages),
    # All after it copy the phases of calls, with the stages in them, to calls of their own.
    assign_stages,
    # Finds what a module returns by the calls that make it, and so before undo_views takes views out.
    lay_activations,
    # Behind lay_activations: a view of a hinted value undoes none from before the hint, so the hint stays.
    undo_views,
    # Behind all that changes the forward: what the backward makes again has the hints and lacks the views, as it does.
    recompute,
    # Conversions of gradients say where the split in time adds up, so they are before it.
    lay_sums,
    # Last: patterns, masks and sums above are those of the whole batch. Later passes see a loop.
    split_time,
)
# Rewrites that hints ask for.
LAY: tuple[GraphPass | Decision, ...] = (
    # First: hints for the batch count its dimensions as the user does, inputs that split_time cut have one more.
    Decision(on_cut_leaves),
    store_in_shares,
    # Before dispatch_rows: rows that go to experts go in the order that they have by then.
    sequence_first,
    # Before dispatch_rows, which takes the mixtures that it reads apart.
    Decision(note_mixtures),
    dispatch_rows,
    # Behind all that reads the hints as the user gave them: from here on they hold the layouts of shards, too.
    Decision(choose_shards),
    shard_variables,
    # Before clip_norm: the norm is that of gradients without the loss scale.
    unscale,
    # Last: the norm is that of what optimizers read, in shards and without the scale.
    clip_norm,
)
# Passes that need layouts: dtypes of exchanges.
LAID: tuple[GraphPass, ...] = (lay_exchanges,)
# Rewrites of each rank's program.
ON_RANKS: tuple[ProgramPass, ...] = (
    # First: it cuts by the rules of ops; the op of join_losses has none, those of offload are never cut.
    overlap,
    join_losses,
    # Behind overlap, which makes collectives of parts: each that reads a view of a variable reads a copy.
    copy_escaping_views,
    # Last: what is kept for the backward is known when no call changes any more.
    offload,
)
# What makes the plan of each rank.
PLAN: tuple[PlanPass, ...] = (
    bucket,
    # Behind bucket: a segment ends where a whole bucket can start, not at each of its parts.
    segment,
    prioritise,
    prefetch,
    # Behind prefetch, whose control registers say where gathers may begin; before registers name actors by number.
    order_gathers,
    give_credits,
)


@final
@dataclass(frozen=True)
class LaidOutStep:
    """The graph with a layout for every value, and what was settled on the way."""

    graph: LogicalGraph
    context: Context
    deduced: tuple[Deduced, ...]


@final
@dataclass(frozen=True)
class LoweredStep:
    """The programs and the plan that ranks run.

    Attributes:
        families: for each of them, by id, those that run the same exchange at the same time.
        programs: of the ranks that were asked for, and of those that stand for others.
        schedule: their plans.
        cut: the number of parts of the batch for overlap.
    """

    communicators: tuple[Communicator, ...]
    families: Mapping[int, tuple[int, ...]]
    programs: tuple[LocalProgram, ...]
    schedule: Scheduled
    cut: BatchCut


def compile_graph(
    graph: LogicalGraph,
    hints: Hints | GridHints,
    placement: Placement,
    ranks: Sequence[int] | None,
    options: Options | None = None,
    homes: Mapping[str, int] | None = None,
    begin: Callable[[str], None] = lambda _: None,
    like: Compiled | None = None,
    kinds: Mapping[int, int] = MappingProxyType({}),
    cache: PassCache = PassCache(),  # noqa: B008 (keeps nothing)
) -> Compiled:
    """Compile a captured graph for some ranks of a placement.

    Every rank that calls this with the same arguments gets a part of the same plan.

    Args:
        graph: the step, as captured.
        hints: what the user fixed; where stages have grids of several numbers of axes, for each.
        ranks: those to make plans for, which are proven not to hang; None for the first of each class of equal
            ones, which are to be looked at, and prove it when they are simulated.
        homes: stages of parameters and buffers, where another program has decided them.
        begin: called with the name of each phase that begins.
        like: the same step for another shape of the batch, with the same options; its choices are
            reused if sizes are close.
        kinds: for each rank the number of its kind of device, where there are several.
        cache: results of passes from plans that were made before; all are the same without.
    """
    by_axes = {placement.axes: hints} if isinstance(hints, Hints) else hints
    before = like.stages if like else None
    context = Context(placement, options or Options(), by_axes, homes, before, cache=cache)
    begin("cutting into stages and micro-batches")
    graph, context = run_on_graph(TRANSFORM, graph, context)
    begin("choosing layouts")
    laid = lay(graph, context, like.deduced if like else ())
    begin("planning")
    return _compiled(laid, lower(laid, ranks, like.cut if like else None, kinds), ranks)


def lay(graph: LogicalGraph, context: Context, before: Sequence[Deduced] = ()) -> LaidOutStep:
    """Layouts: what hints ask of the graph, deduction and boxing, the dtypes of exchanges.

    `before` is what was deduced for another shape of the batch.
    """
    graph, context = run_on_graph(LAY, graph, context)
    graph, deduced = lay_out(graph, context, before)
    graph, context = run_on_graph(LAID, graph, context, with_layouts=True)
    checked = context.cache.of(check_signatures, graph)
    return LaidOutStep(checked, replace(context, graph=checked), deduced)


def lower(
    laid: LaidOutStep,
    ranks: Sequence[int] | None,
    before: BatchCut | None = None,
    kinds: Mapping[int, int] = MappingProxyType({}),
) -> LoweredStep:
    """Local programs and plans. With stages or micro-batches it plans all ranks: one of each class of equal ranks.

    So it is where no `ranks` are named, too. `before` is how another shape of the batch was cut; equal ranks have
    equal `kinds` of devices.
    """
    graph, context = laid.graph, laid.context
    stages, every = context.stages, context.placement.ranks
    groups = communicators(graph)
    together = graph.micro_batches > 1 or len(stages.placements) > 1
    by_memory = context.options.memory_limit is not None or ranks is None
    folded = together or ranks is None
    classes = rank_classes(graph, groups, every, by_memory, kinds) if folded else {}
    planned = sorted({*classes.values(), *(ranks or ())})
    most = context.options.most_classes
    if most is not None and len(planned) > most:
        raise UserError(
            f"{len(planned)} ranks are not alike, more than the {most} that may be planned: give tensors that are "
            "split along two axes a layout, or change the numbers of ranks along these axes"
        )
    local = localize_all(graph, planned, groups, stages.homes, context.cache)
    whole = before and before.weighed and before.parts == 1 and all(x.taken for x in laid.deduced)
    related = families(graph, groups)
    cut = BatchCut()
    if not whole and may_cut(graph, context.options):
        # What the first rank finds best, all take.
        first = min(every)
        program = local.get(first) or localize(graph, first, groups, stages.homes)
        cut = context.cache.of(best_cut, program, groups, related, context.costs, context)
    programs = run_on_programs(ON_RANKS, local.values(), replace(context, parts=cut.parts))
    schedule = plan_ranks(PLAN, programs, groups, context, classes if together else {}, related)
    schedule = replace(schedule, classes=classes)
    return LoweredStep(groups, related, programs, schedule, cut)


def _compiled(laid: LaidOutStep, lowered: LoweredStep, wanted: Sequence[int] | None) -> Compiled:
    """The parts of the result that were asked for; raises where the plan takes more memory than there may be."""
    graph, schedule, options = laid.graph, lowered.schedule, laid.context.options
    plans = {plan.rank: plan for plan in schedule.plans}
    ranks = plans if wanted is None else wanted
    own = tuple(program for program in lowered.programs if program.rank in ranks)
    plan = Plan(graph.name, lowered.communicators, tuple(plans[each.rank] for each in own))
    if wanted is not None:
        schedule.prove_live()
    # Under a limit every rank looks at all that it knows, so that all give up alike.
    looked_at = () if options.memory_limit is None else schedule.plans
    peaks = tuple(
        laid.context.cache.of(memory, each, schedule.moments(each.rank), at=each.rank)
        for each in looked_at
    )
    held = check_limit(peaks, graph, lowered.programs, options)
    return Compiled(
        graph,
        laid.context.stages,
        own,
        plan,
        options,
        schedule,
        laid.deduced,
        laid.context.stored,
        (*laid.context.notes, *lowered.cut.notes),
        lowered.cut,
        lowered.families,
        tuple(peak for peak in held if peak.rank in ranks),
    )
