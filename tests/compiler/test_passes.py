"""Every pass, before and after, as text; one row of `PASSES` and one file `golden/<row>.txt` for each.

The first part of a file is a graph, the input of the row; parts end with a line of dashes. A pass on
graphs has one more part, the graph after it. One on what is made of graphs has two: before and after.
For a new pass, write a row, a file with a small graph on which it does something, and run `make golden`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

from compiler.pass_parts import (
    HOMES,
    PAIR,
    actors,
    actors_text,
    assignment_text,
    before_boxing,
    boxed,
    buckets,
    deduced,
    gathering,
    local,
    on,
    on_programs,
    prioritised,
    schedule_text,
    sharded,
    staged,
    with_copies_of_1f1b,
)
from weft.compiler import pipeline
from weft.compiler.experts.dispatch import dispatch_rows
from weft.compiler.experts.unsorted import unsorted
from weft.compiler.families.class_loss import fuse_class_losses
from weft.compiler.families.joined_loss import join_losses
from weft.compiler.families.table import expand
from weft.compiler.graph.apart import keep_apart
from weft.compiler.graph.causal_masks import causal_masks
from weft.compiler.graph.joined_products import join_products
from weft.compiler.graph.products_first import products_first
from weft.compiler.graph.rewriting import undo_views
from weft.compiler.graph.shares import store_in_shares
from weft.compiler.layouts.deduce import Hints
from weft.compiler.local.aliases import copy_escaping_views
from weft.compiler.local.offload import offload
from weft.compiler.local.overlap import overlap
from weft.compiler.microbatch.split import split_time
from weft.compiler.microbatch.time_first import time_first
from weft.compiler.options import Options
from weft.compiler.schedule import schedule
from weft.compiler.schedule.credits import credit
from weft.compiler.schedule.prefetch import gathers_first
from weft.compiler.schedule.presets import split_backward
from weft.compiler.stages import join as stages_join
from weft.compiler.stages.cut import copy_sources, cut_stages
from weft.compiler.stages.join import lay_out
from weft.compiler.stages.stages import Stages
from weft.compiler.training.activations import lay_activations
from weft.compiler.training.clip import clip_norm
from weft.compiler.training.exchange_dtypes import lay_exchanges
from weft.compiler.training.loss_scale import scale_loss, unscale
from weft.compiler.training.precision import lay_sums
from weft.compiler.training.recompute import recompute
from weft.hardware import CostModel
from weft.ir import LocalProgram, LogicalGraph, parse_graph, parse_local, verify, verify_local
from weft.layout import Broadcast, Split, placement
from weft.strategy.parts import Stage
from weft.strategy.precision import Precision

# What a row makes of the graph that its file begins with: the parts that follow it there.
Row: TypeAlias = Callable[[LogicalGraph], object]

GRID = placement("cpu", [[0, 1], [2, 3]])
FIRST, SECOND = placement("cpu", [0]), placement("cpu", [1])
STAGED = Options(stages=(Stage(["first"], FIRST), Stage(["second"], SECOND)))
TWO_EACH = Stages((PAIR, placement("cpu", [2, 3])), HOMES)
B, S0, S1 = Broadcast(), Split(0), Split(1)

# One row for each pass, or for each way of one pass, behind a dot: how it is called.
PASSES: dict[str, Row] = {
    # transform
    "keep_apart": keep_apart,
    "products_first": products_first,
    "causal_masks": causal_masks,
    "unsorted": unsorted,
    "join_products": join_products,
    "scale_loss": scale_loss,
    "assign_stages": lambda graph: staged(graph, STAGED),
    "lay_activations": lambda graph: lay_activations(graph, [("blocks.*.proj", (S1,))]),
    "undo_views": undo_views,
    "recompute": lambda graph: recompute(graph, ["blocks.*"]),
    "lay_sums": lambda graph: lay_sums(graph, Precision(), 2),
    "lay_sums.as_they_are": lambda graph: lay_sums(graph, Precision(accumulate=None), 2),
    "split_time": lambda graph: split_time(graph, 4),
    # lay
    "store_in_shares": lambda graph: store_in_shares(graph, *on(PAIR, w=(S0,))),
    "time_first": lambda graph: time_first(graph, *on(PAIR, x=(S1,))),
    "time_first.beside_data": lambda graph: time_first(graph, *on(GRID, x=(S0, S1))),
    "dispatch_rows": lambda graph: dispatch_rows(graph, *on(PAIR, w=(S0,)), 1.0).graph,
    "shard_variables.level_1": lambda graph: sharded(graph, 1),
    "shard_variables.level_3": lambda graph: sharded(graph, 3),
    "unscale": unscale,
    "clip_norm": lambda graph: clip_norm(graph, 1.5, ["grad_norm"]),
    "lay_exchanges": lambda graph: lay_exchanges(graph, Precision(reduce="fp32")),
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
    "lay_out": lambda graph: lay_out(graph, {1: Hints({"x": (S0,)})}, TWO_EACH, CostModel())[0],
    # lower
    "localize.data": lambda graph: local(graph, 1),
    "localize.columns": lambda graph: local(graph, 1),
    "localize.rows": lambda graph: local(graph, 1),
    "overlap": lambda graph: on_programs(graph, lambda program: overlap(program, 2)),
    "join_losses": lambda graph: on_programs(graph, join_losses),
    "copy_escaping_views": lambda graph: on_programs(graph, copy_escaping_views),
    "offload": lambda graph: on_programs(graph, lambda program: offload(program, graph, ["a"])),
    # schedule
    "split_backward": lambda graph: on_programs(graph, split_backward, rank=1),
    "bucket": lambda graph: (local(graph), schedule_text(buckets(graph))),
    "segment": lambda graph: (schedule_text(buckets(graph)), actors_text(actors(graph))),
    "with_priorities": lambda graph: (
        actors_text(actors(graph, rank=1, staged=True)),
        actors_text(prioritised(graph, rank=1)),
    ),
    "prefetch": lambda graph: (actors_text(actors(graph)), actors_text(*gathering(graph))),
    "gathers_first": lambda graph: (
        actors_text(*gathering(graph)),
        actors_text(*gathers_first(local(graph), *gathering(graph))),
    ),
    "credit": lambda graph: (actors_text(actors(graph)), credit(local(graph), actors(graph))),
    "with_copies": with_copies_of_1f1b,
}

# Functions that passes are imported beside, and why they have no row.
NO_PASSES = {
    **dict.fromkeys(
        ("check_limit", "check_signatures", "prove_live"),
        "refuse, and change nothing",
    ),
    **dict.fromkeys(
        ("communicators", "device_of", "memory", "moments_of", "rank_classes"),
        "tell something of a program",
    ),
    **dict.fromkeys(
        ("best_cut", "may_cut", "computed", "preset", "early_actors", "enough", "fewest"),
        "decide what a pass is told",
    ),
    "of_preset": "decides what with_copies is told",
    "describe": "words for a message",
    "layout_of": "the layout of a value",
    "on_cut_leaves": "changes hints alone",
    "localize_all": "localize for several ranks",
    "like": "copies a plan's credits and orders to a plan that is alike",
    "plan_alone": "the passes of schedule, one after the other",
    "plan_together": "the passes of schedule, one after the other",
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
    assert imported_by(pipeline, schedule, stages_join) == {*NO_PASSES, *rows}


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
