"""The whole way from a captured graph to a plan, one pass a line (docs/design.md, section 2)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from weft.compiler.aliases import copy_escaping_views
from weft.compiler.assignment import Assignment
from weft.compiler.box import box
from weft.compiler.bucket import bucket
from weft.compiler.class_split import split_classes
from weft.compiler.clip import clip_norm
from weft.compiler.communicators import communicators
from weft.compiler.credit import credit
from weft.compiler.deduce import Hints, deduce
from weft.compiler.localize import localize
from weft.compiler.options import Options, check_supported
from weft.compiler.segment import segment
from weft.compiler.signatures import check_signatures
from weft.ir import LogicalGraph, Plan, RankPlan, verify
from weft.ir.plan import Communicator, LocalProgram
from weft.ir.verify_plan import verify_communicators
from weft.layout import Placement


@dataclass(frozen=True)
class Compiled:
    """What the pipeline made on the way, for `explain` and for the runtime.

    Attributes:
        graph: the logical graph with layouts and boxing.
        programs: the local programs of the ranks that were asked for.
        plan: their plans.
        fingerprint: equal on all ranks that compiled the same program.
    """

    graph: LogicalGraph
    programs: tuple[LocalProgram, ...]
    plan: Plan
    fingerprint: str


def compile_graph(
    graph: LogicalGraph,
    hints: Hints,
    placement: Placement,
    ranks: Sequence[int],
    options: Options | None = None,
) -> Compiled:
    """Compile a captured graph for some ranks of a placement.

    Every rank that calls this with the same graph, hints, placement and options gets a part of the
    same plan.
    """
    options = options or Options()
    check_supported(options)
    graph = verify(clip_norm(verify(graph), options.clip_norm))
    assignment: Assignment = deduce(graph, hints, placement, options.cost_model)
    boxed = check_signatures(verify(box(*split_classes(graph, assignment)), with_layouts=True))
    groups = communicators(boxed)
    programs = tuple(copy_escaping_views(localize(boxed, rank, groups)) for rank in ranks)
    plans = tuple(_rank_plan(program, groups, options) for program in programs)
    plan = Plan(graph.name, groups, plans)
    fingerprint = hashlib.sha256(f"{boxed}{groups}{options}".encode()).hexdigest()
    return Compiled(boxed, programs, plan, fingerprint)


def _rank_plan(
    program: LocalProgram, groups: tuple[Communicator, ...], options: Options
) -> RankPlan:
    schedule = bucket(program, options.bucket_bytes)
    # After bucketing: a segment ends where a whole bucket can start, not at each of its parts.
    actors = segment(program, schedule, groups)
    plan = credit(program, actors)
    verify_communicators(plan, groups)
    return plan
