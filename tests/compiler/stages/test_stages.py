"""Stages: which call runs where, cutting, joining."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from models import GPT, Batch, ResNet, classification_loss, image_batch, token_batch, token_loss
from weft.capture import capture
from weft.compiler.context import Context, Options, Stages
from weft.compiler.hints import Hints
from weft.compiler.layouts.box import deduce
from weft.compiler.local.localize import node_phases
from weft.compiler.stages.choose import assign_stages, choose_stages
from weft.compiler.stages.cut import copy_sources, cut_stages
from weft.compiler.stages.lay_out import lay_out
from weft.compiler.stages.stages import stage_placements
from weft.errors import StrategyError
from weft.hardware import CostModel
from weft.ir import parse_graph, verify
from weft.ir.logical import Box, Call, Input, LogicalGraph
from weft.layout import SBP, Placement, Split, placement
from weft.ops import flops, traffic
from weft.strategy.parts import Stage


def on(*ranks: Any) -> Placement:
    return placement("cpu", list(ranks))


@pytest.mark.parametrize(
    ("grid", "stages", "expected"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2], 2, [[0, 1], [2]]),
        ([[0, 1], [2, 3]], 2, [[[0, 1]], [[2, 3]]]),
        ([4, 5], 4, [[4], [5], [4], [5]]),
        ([0, 1], 3, [[0], [1], [0]]),
        ([0, 1], 1, [[0, 1]]),
        ([0, 1], (), [[0, 1]]),
    ],
)
def test_a_number_of_stages_cuts_the_first_axis(grid: Any, stages: Any, expected: Any) -> None:
    assert [each.grid for each in stage_placements(stages, on(*grid))] == expected


def test_stages_may_be_equal_disjoint_or_nested() -> None:
    placements = on(0, 1), on(2), on(1, 0), on(0, 1, 2)
    stages = tuple(Stage([], each) for each in placements)
    assert stage_placements(stages, on(0, 1, 2)) == placements
    everywhere = Stages(placements).everywhere()
    assert (everywhere.placement, len(everywhere.sbp)) == (on(0, 1, 2), 1)


def captured(model: nn.Module, loss: Any, batch: Batch) -> LogicalGraph:
    return capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch).graph


def assigned(graph: LogicalGraph, stages: int) -> tuple[LogicalGraph, Stages]:
    context = choose_stages(graph, Context(on(*range(stages)), Options(stages=stages)))
    return assign_stages(graph, context), context.stages


def modules_of(graph: LogicalGraph, stage: int) -> set[str]:
    """The first two names of the modules of a stage's forward calls."""
    places = (
        call.location
        for call in graph.of_kind(Call)
        if call.phase == type(call.phase)(stage, "forward")
    )
    return {".".join(place.module.split(".")[:2]) for place in places if place} - {""}


def test_an_even_split_cuts_between_blocks() -> None:
    graph, stages = assigned(captured(GPT(layers=6), token_loss, token_batch()), 3)
    assert modules_of(graph, 0) == {"tokens", "positions", "dropout", "blocks.0", "blocks.1"} - {
        "dropout"
    }
    assert modules_of(graph, 1) == {"blocks.2", "blocks.3"}
    assert modules_of(graph, 2) == {"blocks.4", "blocks.5", "norm", "head"}
    assert stages.homes["blocks.3.up.weight"] == 1
    # One activation there and one gradient back at each border.
    parts = cut_stages(copy_sources(graph), stages)
    assert [len(part.crossing) for part in parts] == [1, 2, 1]


def test_an_even_split_keeps_blocks_whole_where_the_stages_are_nearly_even() -> None:
    """Seven equal blocks in two stages: 4 and 3, not three and a half each."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    batch = {"x": torch.zeros(64, 8)}
    model = nn.Sequential(*(block() for _ in range(7)))
    graph, _ = assigned(captured(model, lambda m, b: m(b["x"]).sum(), batch), 2)
    firsts = [{path.split(".")[0] for path in modules_of(graph, stage)} for stage in range(2)]
    assert sorted(map(len, firsts)) == [3, 4]
    assert not firsts[0] & firsts[1]


def test_an_even_split_cuts_within_a_block_where_one_is_too_large() -> None:
    """One block dearer than all else is cut itself."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(
                nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 8))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.blocks(x)
            return out

    batch = {"x": torch.zeros(64, 8)}
    graph = captured(Model(), lambda m, b: m(b["x"]).sum(), batch)
    graph, _ = assigned(graph, 2)
    stage_of = {
        call.location.module: call.phase.stage
        for call in graph.of_kind(Call)
        if call.phase.kind == "forward" and call.location
    }
    assert (stage_of["blocks.1.0"], stage_of["blocks.1.1"]) == (0, 1)


def test_stages_of_an_even_split_cost_about_the_same() -> None:
    graph, _ = assigned(captured(ResNet(blocks=3).double(), classification_loss, image_batch()), 2)
    costs: Counter[int] = Counter()
    for call in graph.of_kind(Call):
        whole = call.first
        costs[call.phase.stage] += int(CostModel().work(flops(whole), traffic(whole)))
    assert set(costs) == {0, 1}
    assert max(costs.values()) < 1.3 * min(costs.values())


@pytest.mark.parametrize(("layers", "expected"), [(4, [1, 1, 2, 0]), (8, [2, 3, 3, 0])])
def test_a_head_dearer_than_a_share_has_the_last_stage_with_its_loss(
    layers: int, expected: list[int]
) -> None:
    """The blocks still go to all other stages as evenly as may be, and never do logits go to a stage of their own."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    blocks = [
        nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
        for _ in range(layers)
    ]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(64, 4096, bias=False))
    batch = {"x": torch.zeros(512, 64), "y": torch.zeros(512, dtype=torch.long)}
    graph, _ = assigned(captured(model, loss, batch), 4)
    calls = [call for call in graph.of_kind(Call) if call.phase.kind == "forward"]
    last = {call.op for call in calls if call.phase.stage == 3}
    assert {"aten.mm.default", "aten._log_softmax.default", "aten.nll_loss_forward.default"} <= last
    found = [
        {path.split(".")[1] for path in modules_of(graph, stage) if path.startswith("0.")}
        for stage in range(4)
    ]
    assert sorted(map(len, found)) == sorted(expected)
    assert sum(map(len, found)) == layers


def test_too_many_stages_are_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    graph = captured(model, lambda m, b: m.weight.sum() * 2, {"x": torch.zeros(2)})
    with pytest.raises(StrategyError, match="the step has only 2 forward ops to cut"):
        assigned(graph, 9)


def test_backward_calls_follow_their_forward() -> None:
    """Each backward op of a block runs where the block's forward does; a tied weight's sum where it lives."""
    graph, stages = assigned(captured(GPT(layers=2, tied=True), token_loss, token_batch()), 2)
    for call in graph.of_kind(Call):
        if call.phase.kind == "backward" and call.location and "blocks" in call.location.module:
            assert call.phase.stage == int(call.location.module.split(".")[1])
    assert stages.homes["tokens.weight"] == 0
    update = next(node for node in graph.nodes if getattr(node, "rule", "") == "SGD")
    assert graph.producers[update.source.name].phase.stage == 0


class Skips(nn.Module):
    """The first of four layers is read by all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with weft.stage(0):
            first = y = self.layers[0](x)
        for number, layer in enumerate(self.layers[1:], 1):
            with weft.stage(number):
                y = layer(y) * first * first
        return y


def test_sums_of_gradients_go_from_stage_to_stage() -> None:
    """What each stage adds to the gradient of a skip is added up there."""
    batch = {"x": torch.randn(4, 8)}
    graph = captured(Skips(), lambda model, batch: model(batch["x"]).square().mean(), batch)
    graph, _ = assigned(graph, 4)
    sums = [call for call in graph.of_kind(Call) if call.op == "aten.add.Tensor"]
    assert [call.phase.stage for call in sums if call.phase.kind == "backward"] == [
        3,
        2,
        2,
        1,
        1,
        1,
    ]


# Two stages with a skip, a leaf of the batch for both, and a weight that both read.
TEXT = """graph "two stages"
%w = parameter "w" : float32[4, 4]
%x = batch "x" : float32[8, 4]
%places = call aten.arange.default(4, dtype=!dtype:float32) : float32[4]
%h = call aten.mm.default(%x, %w) : float32[8, 4]
%h2 = call aten.add.Tensor(%h, %places) : float32[8, 4]
%y = call aten.mm.default(%h2, %w) : float32[8, 4] {1 forward}
%z = call aten.add.Tensor(%y, %x) : float32[8, 4] {1 forward}
%z2 = call aten.add.Tensor(%z, %places) : float32[8, 4] {1 forward}
%loss = call aten.sum.default(%z2) : float32[] {1 forward}
%gz = call aten.ones_like.default(%z2) : float32[8, 4] {1 backward}
%ht = call aten.t.default(%h2) : float32[4, 8] {1 backward}
%g1 = call aten.mm.default(%ht, %gz) : float32[4, 4] {1 backward}
%wt = call aten.t.default(%w) : float32[4, 4] {1 backward}
%gh = call aten.mm.default(%gz, %wt) : float32[8, 4] {1 backward}
%xt = call aten.t.default(%x) : float32[4, 8] {0 backward}
%g0 = call aten.mm.default(%xt, %gh) : float32[4, 4] {0 backward}
%g = call aten.add.Tensor(%g0, %g1) : float32[4, 4] {0 backward}
update "SGD" group 0 %w from %g
output "loss" %loss
"""


def two_stages() -> tuple[LogicalGraph, Stages]:
    return verify(parse_graph(TEXT)), Stages((on(0, 1), on(2, 3)), {"w": 0})


def test_cut() -> None:
    graph, stages = two_stages()
    parts = cut_stages(copy_sources(graph), stages)
    assert [dict(part.crossing) for part in parts] == [
        {"gh.at0": "gh", "g1.at0": "g1"},
        {"h2.at1": "h2", "w.at1": "w"},
    ]
    # Each stage takes the leaf from the user, and makes positions itself.
    for part in parts:
        verify(part.graph)
        assert [node.key for node in part.graph.of_kind(Input) if node.key == "x"] == ["x"]
        assert sum(call.op == "aten.arange.default" for call in part.graph.of_kind(Call)) == 1


def joined(placements: tuple[Placement, ...], **inputs: SBP) -> LogicalGraph:
    graph, _ = two_stages()
    fixed = {key: (sbp,) for key, sbp in ({"x": Split(0)} | inputs).items()}
    hints, stages = {1: Hints(fixed)}, Stages(placements, {"w": 0})
    context = Context(placements[0], hints=hints, stages=stages)
    return verify(lay_out(graph, context)[0], with_layouts=True)


def test_join() -> None:
    graph = joined((on(0, 1), on(2, 3)))
    assert parse_graph(str(graph)) == graph


def test_stages_on_the_same_ranks_share_leaves() -> None:
    """Interleaved stages take a leaf once; what crosses stays on its ranks."""
    graph = joined((on(0, 1), on(0, 1)))
    assert [node.key for node in graph.of_kind(Input) if node.role == "batch"] == ["x"]
    assert {value.layout.placement for value in graph.values.values()} == {on(0, 1)}


@pytest.mark.parametrize(("inputs", "name"), [({}, "h2"), ({"x": Split(1), "w": Split(0)}, "w")])
def test_a_crossing_keeps_the_layout_of_an_earlier_stage(inputs: dict[str, SBP], name: str) -> None:
    graph = joined((on(0, 1), on(2, 3)), **inputs)
    assert graph.values[name].layout.sbp == (Split(0),)
    assert graph.values[f"{name}.at1"].layout.sbp == (Split(0),)


def test_a_stage_pays_for_the_sums_that_it_sends() -> None:
    """A sum in parts would seem to cost nothing in the stage that makes it: parts of it do not cross."""
    graph, stages = two_stages()
    first, last = cut_stages(copy_sources(graph), stages)
    # The gradient of a parameter is reduced where it is used, with others.
    assert (first.leaving, last.leaving) == ({"h2"}, {"gh"})
    free = Hints({"x": (Split(1),), "w": (Split(0),)})
    costs = [
        deduce(first.graph, replace(free, leaving=leaving), on(0, 1)).cost
        for leaving in (frozenset[str](), first.leaving)
    ]
    assert costs[0] < costs[1]


def test_a_crossing_is_free_where_the_widths_differ() -> None:
    graph = joined((on(0), on(1, 2)))
    assert graph.values["h2.at1"].layout.sbp == (Split(0),)


def test_phases_of_boxings_and_updates() -> None:
    graph = joined((on(0, 1), on(2, 3)))
    found = dict(zip(map(str, graph.nodes), node_phases(graph, {"w": 0}), strict=True))
    phases = {node.output.name: found[str(node)] for node in graph.of_kind(Box)}
    assert str(phases["h2.at1"]) == "{1 forward}"
    assert str(phases["gh.at0"]) == "{0 backward}"
    # To the caller: as the value is made.
    assert str(phases[graph.nodes[-1].value.name]) == "{1 forward}"
    assert [str(p) for node, p in found.items() if node.startswith("Update")] == ["{0 backward}"]
