"""Every pass, before and after, as text; one row of `PASSES` and one file `golden/<row>.txt` for each.

The first part of a file is a graph, the input of the row; parts end with a line of dashes. A pass on
graphs has one more part, the graph after it. One on what is made of graphs has two: before and after.
For a new pass, write a row, a file with a small graph on which it does something, and run `make golden`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

from compiler.pass_parts import (
    HOMES,
    PAIR,
    actors,
    assignment_text,
    before_boxing,
    boxed,
    buckets,
    deduced,
    local,
    on,
    on_plans,
    on_program,
    replayed,
    schedule_text,
    segmented,
    sharded,
    staged,
    with_copies_of_1f1b,
)
from contexts import NOTHING, asked, hinted
from weft.compiler import pipeline
from weft.compiler.context import Context, Options, Stages
from weft.compiler.decompositions.fused_losses import fuse_class_losses, join_losses
from weft.compiler.decompositions.table import expand
from weft.compiler.experts.dispatch import dispatch_rows
from weft.compiler.experts.remove_sorts import remove_sorts
from weft.compiler.graph.causal_masks import causal_masks
from weft.compiler.graph.joined_products import join_products
from weft.compiler.graph.products_first import products_first
from weft.compiler.graph.rewriting import undo_views
from weft.compiler.graph.shares import store_in_shares
from weft.compiler.graph.unmerged_dims import keep_unmerged
from weft.compiler.local.offload import copy_escaping_views, offload
from weft.compiler.local.overlap import overlap
from weft.compiler.microbatch.sequence_first import sequence_first
from weft.compiler.microbatch.split import split_time
from weft.compiler.passes import GraphPass
from weft.compiler.plans.specialize import Target, outline, specialize
from weft.compiler.schedule import schedule
from weft.compiler.schedule.credits import give_credits
from weft.compiler.schedule.priorities import order_gathers, prefetch, prioritise
from weft.compiler.schedule.schedule import split_backward
from weft.compiler.stages import lay_out as stage_layouts
from weft.compiler.stages.cut import copy_sources, cut_stages
from weft.compiler.stages.lay_out import lay_out
from weft.compiler.training.activations import lay_activations
from weft.compiler.training.gradients import clip_norm, scale_loss, unscale
from weft.compiler.training.precision import lay_exchanges, lay_sums
from weft.compiler.training.recompute import recompute
from weft.ir import LocalProgram, LogicalGraph, parse_graph, parse_local, verify, verify_local
from weft.layout import Broadcast, Split, placement
from weft.program.planning import build
from weft.strategy.parts import Stage
from weft.strategy.precision import Precision

# What a row makes of the graph that its file begins with: the parts that follow it there.
Row: TypeAlias = Callable[[LogicalGraph], object]

GRID = placement("cpu", [[0, 1], [2, 3]])
FIRST, SECOND = placement("cpu", [0]), placement("cpu", [1])
STAGED = Options(stages=(Stage(["first"], FIRST), Stage(["second"], SECOND)))
TWO_EACH = Stages((PAIR, placement("cpu", [2, 3])), HOMES)
ONEDNN = Target("cpu", onednn=True)
B, S0, S1 = Broadcast(), Split(0), Split(1)


def told(pass_: GraphPass, context: Context = NOTHING) -> Row:
    """A pass on graphs, and what it is told."""
    return lambda graph: pass_(graph, context)


# One row for each pass, or for each way of one pass, behind a dot: what it is told, or how it is called.
PASSES: dict[str, Row] = {
    # transform
    "keep_unmerged": told(keep_unmerged),
    "products_first": told(products_first),
    "causal_masks": told(causal_masks),
    "remove_sorts": told(remove_sorts),
    "join_products": told(join_products),
    "scale_loss": told(scale_loss),
    "assign_stages": lambda graph: staged(graph, STAGED),
    "lay_activations": told(lay_activations, asked(activations=[("blocks.*.proj", (S1,))])),
    "undo_views": told(undo_views),
    "recompute": told(recompute, asked(recompute=["blocks.*"])),
    "lay_sums": told(lay_sums, asked(micro_batches=2)),
    "lay_sums.as_they_are": told(
        lay_sums, asked(precision=Precision(accumulate=None), micro_batches=2)
    ),
    "split_time": told(split_time, asked(micro_batches=4)),
    # lay
    "store_in_shares": told(store_in_shares, on(PAIR, w=(S0,))),
    "sequence_first": told(sequence_first, on(PAIR, x=(S1,))),
    "sequence_first.beside_data": told(sequence_first, on(GRID, x=(S0, S1))),
    "dispatch_rows": told(dispatch_rows, hinted(PAIR, {"w": (S0,)}, expert_capacity=1.0)),
    "shard_variables.level_1": lambda graph: sharded(graph, 1),
    "shard_variables.level_3": lambda graph: sharded(graph, 3),
    "unscale": told(unscale),
    "clip_norm": told(clip_norm, asked(clip_norm=1.5, metrics=["grad_norm"])),
    "lay_exchanges": told(lay_exchanges, asked(precision=Precision(reduce="fp32"))),
    # lay_out
    "copy_sources": copy_sources,
    "cut_stages": lambda graph: [part.graph for part in cut_stages(graph, TWO_EACH)],
    "deduce": lambda graph: assignment_text(graph, deduced(graph, x=(S0,), w=(B,))),
    "expand.log_softmax": lambda graph: before_boxing(graph, expand, w=(S1,)),
    "fuse_class_losses": lambda graph: before_boxing(graph, fuse_class_losses, w=(S1,)),
    "expand.batch_norm": lambda graph: before_boxing(graph, expand, x=(S0,)),
    "box.data": lambda graph: boxed(graph, x=(S0,), w=(B,)),
    "box.columns": lambda graph: boxed(graph, x=(B,), w=(S0,)),
    "box.rows": lambda graph: boxed(graph, x=(S0,), w=(S1,)),
    "lay_out": lambda graph: lay_out(graph, replace(on(PAIR, x=(S0,)), stages=TWO_EACH))[0],
    # lower
    "localize.data": lambda graph: local(graph, 1),
    "localize.columns": lambda graph: local(graph, 1),
    "localize.rows": lambda graph: local(graph, 1),
    "overlap": lambda graph: on_program(graph, overlap, replace(NOTHING, parts=2)),
    "join_losses": lambda graph: on_program(graph, join_losses),
    "copy_escaping_views": lambda graph: on_program(graph, copy_escaping_views),
    "offload": lambda graph: on_program(graph, offload, asked(offload=["a"])),
    # schedule
    "split_backward": lambda graph: (local(graph, 1), split_backward(local(graph, 1))),
    "bucket": lambda graph: (local(graph), schedule_text(buckets(graph))),
    "segment": lambda graph: (schedule_text(buckets(graph)), actors(graph)),
    "prioritise": lambda graph: (actors(graph, rank=1), actors(graph, prioritise, rank=1)),
    "prefetch": lambda graph: (actors(graph), actors(graph, prefetch)),
    "order_gathers": lambda graph: (
        actors(graph, prefetch),
        actors(graph, prefetch, order_gathers),
    ),
    "give_credits": lambda graph: (actors(graph), segmented(graph, give_credits).plan),
    "with_copies": with_copies_of_1f1b,
    # on the rank that runs it
    "outline": lambda graph: on_plans(graph, lambda plan: outline(plan, fewest=3)),
    "with_cuda_graphs": lambda graph: on_plans(graph, lambda plan: replayed(graph, plan)),
    "specialize": lambda graph: on_plans(graph, lambda plan: specialize(plan, ONEDNN)),
}

# Functions that passes are imported beside, and why they have no row.
NO_PASSES = {
    **dict.fromkeys(
        ("check_limit", "check_signatures", "prove_live"),
        "refuse, and change nothing",
    ),
    **dict.fromkeys(
        (
            "communicators",
            "families",
            "memory",
            "moments",
            "moments_of",
            "order_constraints",
            "rank_classes",
        ),
        "tell something of a program",
    ),
    **dict.fromkeys(
        (
            "batch_hints",
            "best_cut",
            "may_cut",
            "computed",
            "preset",
            "enough_slots",
            "is_hint",
            "storage",
            "fewest_slots",
        ),
        "decide what a pass is told",
    ),
    "preset_slots": "decides what with_copies is told",
    "join_stages": "a part of lay_out",
    **dict.fromkeys(
        ("choose_stages", "on_cut_leaves", "note_mixtures", "choose_shards", "with_leaves"),
        "decide what passes are told",
    ),
    **dict.fromkeys(("run_on_draft", "run_on_graph", "run_on_programs"), "run passes"),
    "localize_all": "localize for several ranks",
    "like": "copies a plan's credits and orders to a plan that is alike",
    "compile_graph": "the passes of pipeline, one after the other",
    "plan_ranks": "the passes of schedule, one after the other",
}

DASHES = "----\n"


@pytest.mark.parametrize("row", PASSES)
def test_pass(golden: Callable[[str, str], None], row: str) -> None:
    """The text is the file's; the pass does something."""
    path = Path(__file__).parent / "golden" / f"{row}.txt"
    assert path.exists(), f"write the graph to run {row} on to {path}, then run: make golden"
    graph = parse_graph(path.read_text().partition(DASHES)[0])
    made = PASSES[row](graph)
    parts = [graph, *(made if isinstance(made, tuple) else (made,))]
    texts = [part_text(part) for part in parts]
    golden(DASHES.join(texts), row)
    assert texts[-2] != texts[-1], f"{row} changes nothing: give it another graph"


def part_text(part: object) -> str:
    """The text of a part, or of several things that are one; graphs and programs are checked."""
    if isinstance(part, list):
        return "".join(map(part_text, part))
    if isinstance(part, LogicalGraph):
        laid = {value.layout is not None for value in part.values.values()}
        verify(part, with_layouts=laid == {True})
    if isinstance(part, LocalProgram):
        assert parse_local(str(verify_local(part))) == part
    return str(part).rstrip("\n") + "\n"


def test_every_pass_has_a_row() -> None:
    """Functions that the compiler's drivers import from its other modules are passes, or said to be none."""
    rows = {row.partition(".")[0] for row in PASSES}
    assert set(NO_PASSES) & rows == set()
    beside = {"split_backward"}  # stands with its driver
    assert imported_by(pipeline, schedule, stage_layouts, build) == {*NO_PASSES, *rows} - beside


def imported_by(*modules: ModuleType) -> set[str]:
    """Functions that modules import from others of the compiler."""
    trees = (ast.parse(Path(str(module.__file__)).read_text()) for module in modules)
    return {
        name.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.compiler.")
        for name in node.names
        if name.name.islower()
    }


def test_every_golden_file_has_a_row() -> None:
    files = {path.stem for path in (Path(__file__).parent / "golden").glob("*.txt")}
    assert files == PASSES.keys()
