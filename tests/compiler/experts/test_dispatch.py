"""Mixtures at real sizes, planned without running: what crosses between ranks, and what they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import weft
from contexts import NOTHING
from mixtures import CHOSEN, Model
from models import token_loss
from weft.boxing import steps
from weft.capture import capture
from weft.compiler.context import options_of
from weft.compiler.experts.remove_sorts import remove_sorts
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.ir import parse_graph
from weft.ir.logical import Box, Call, LogicalGraph
from weft.units import ITEM_SIZE

WIDTH, EXPERTS, RANKS, ROWS, TIME = 1024, 8, 8, 4, 512
TOKENS = ROWS * TIME  # of a rank
SENT = TOKENS * CHOSEN * WIDTH * 4 * (RANKS - 1) // RANKS  # bytes of its rows that leave it
S, B = weft.split, weft.broadcast
EXPERT = weft.expert_parallel(["*.up", "*.down"], capacity=1.0)
# Behind attention rows lie split; looking all of them up on every rank would cost nothing.
EXPERT = replace(EXPERT, activations={"embedding": S(0)})


@cache
def captured(ranks: int = RANKS, **more: Any) -> LogicalGraph:
    with torch.device("meta"):
        model = Model(width=WIDTH, experts=EXPERTS, layers=2, **more)
        ids = torch.zeros(ROWS * ranks, TIME, dtype=torch.long)
    batch = {"x": ids, "y": ids}
    optimizer = torch.optim.AdamW(model.parameters())
    return capture(model, token_loss, optimizer, batch).graph


def planned(strategy: weft.Strategy, grid: Any = None, **more: Any) -> Compiled:
    grid = list(range(RANKS)) if grid is None else grid
    place, options = weft.placement("cpu", grid), options_of(strategy)
    graph = captured(len(place.ranks), **more)
    hints = strategy_hints(strategy, graph, stage_placements(options.stages, place))
    return compile_graph(graph, hints, place, (0,), options)


def sent(compiled: Compiled, kinds: bool = True) -> Counter[str]:
    """Bytes that a rank sends of activations, by kind of exchange."""
    found: Counter[str] = Counter()
    ranks = len(compiled.stages.placements[0].ranks)
    for box in compiled.graph.of_kind(Box):
        source = compiled.graph.values[box.input.name]
        size = ITEM_SIZE[box.output.dtype]
        for step in steps(source.layout, box.output.layout, source.shape, size):
            if "update" not in box.cause:
                found[step.kind] += step.bytes // ranks
    return found


def test_tokens_travel_to_their_experts_and_back() -> None:
    """Four all-to-alls of a mixture's rows: nothing else of size crosses, no expert, no activation."""
    found = sent(planned(EXPERT))
    exchanged = found.pop("all_to_all")
    # The experts' numbers of the rows travel too, 8 bytes each.
    assert 2 * 4 * SENT <= exchanged <= 2 * 4 * SENT * 1.002
    assert sum(found.values()) < 0.002 * exchanged


def test_a_group_beside_data_parallelism_sends_no_more() -> None:
    grid = [[RANKS * i + j for j in range(RANKS)] for i in range(2)]
    over = {"*.up": (B, S(0)), "*.down": (B, S(0)), "*": B}
    strategy = replace(EXPERT, batch={"*": S(0)}, parameters=over)
    found = sent(planned(strategy, grid))
    assert 2 * 4 * SENT <= found["all_to_all"] <= 2 * 4 * SENT * 1.002


def test_buffers_without_a_capacity_hold_all_that_there_can_be() -> None:
    """Of a token, a rank with one expert can get one row: four times the even share of two of eight."""
    compiled = planned(replace(EXPERT, expert_capacity=None))
    assert sum(sent(compiled).values()) <= 2 * 4 * SENT * RANKS / CHOSEN * 1.002
    rows = {
        compiled.graph.values[value.name].shape[:2]
        for node in compiled.graph.of_kind(Call)
        for value in node.outputs
        if node.op == "weft.dispatch"
    }
    assert rows == {(RANKS, RANKS * TOKENS)}
    (note,) = compiled.notes
    assert "2 mixtures (layers.0, …): buffers hold 4 times the rows of an even routing" in note
    assert planned(EXPERT).notes == ()


def test_whole_tokens_cost_no_more_than_sums() -> None:
    """Megatron-LM's way is a sum over the ranks for each mixture and direction; less is found."""
    strategy = weft.Strategy({"*": B}, {"*.up": S(0), "*.down": S(0), "*": B}, expert_capacity=2.0)
    sums = 2 * 2 * 2 * (TOKENS * RANKS) * WIDTH * 4 * (RANKS - 1) // RANKS
    assert sum(sent(planned(strategy)).values()) <= sums


def test_of_whole_tokens_sums_travel_not_their_rows() -> None:
    """Four experts on two ranks: a sum over both in each direction, and no work on rows of others."""
    strategy = weft.Strategy({"*": B}, {"*.up": S(0), "*.down": S(0), "*": B}, expert_capacity=1.0)
    compiled = planned(strategy, [0, 1], each=4)
    # Half of the sums of two mixtures, forward and backward, to be reduced and to be gathered.
    sums = 2 * 2 * (2 * TOKENS) * WIDTH * 4
    assert sum(sent(compiled).values()) <= 1.01 * sums
    rows = {
        value.shape[:1] for value in compiled.graph.values.values() if value.shape[1:] == (WIDTH,)
    }
    assert (4 * 2 * TOKENS,) not in rows


def test_biases_do_not_travel() -> None:
    """A bias is as wide as what is computed; numbers of rows and experts alone travel beside the rows."""
    parameters = {"*.up*": S(0), "*.down*": S(0), "*": B}
    found = sent(planned(replace(EXPERT, parameters=parameters), biased=True))
    assert 2 * 4 * SENT <= found["all_to_all"] <= 2 * 4 * SENT * 1.002


def test_data_parallelism_exchanges_gradients_alone() -> None:
    compiled = planned(weft.data_parallel())
    assert sum(sent(compiled).values()) < 0.001 * SENT
    peak = compiled.peaks[0].memory
    # Rows, gate and up, their product: no tensor of tokens by weights.
    rows = TOKENS * CHOSEN * 4
    assert peak.activations < 2 * rows * (4 * WIDTH + 3 * 4 * WIDTH)


def test_a_rank_holds_its_experts_alone() -> None:
    whole = planned(weft.data_parallel()).peaks[0].memory
    part = planned(EXPERT).peaks[0].memory
    experts = 2 * EXPERTS * 6 * WIDTH * WIDTH * 4
    assert whole.parameters - part.parameters == experts * (RANKS - 1) // RANKS
    # Rows, gate and up, what is made of them, and the products.
    assert part.activations < 1.1 * 2 * (TOKENS * CHOSEN * WIDTH * 4) * (1 + 4 + 2 + 2 + 1)


def test_a_sort_is_taken_out() -> None:
    graph = captured()
    without = remove_sorts(graph, NOTHING)
    ops = [node.op for node in without.of_kind(Call)]
    assert "aten.sort.default" in [node.op for node in graph.of_kind(Call)]
    assert not {"aten.sort.default", "aten.index.Tensor", "weft.segments"} & set(ops)
    assert parse_graph(str(without)) == without
