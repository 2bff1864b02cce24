"""The search finds what trying everything finds, keeps what is fixed and the limit, and bounds the rest."""

from __future__ import annotations

import random
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from search.jobs import (
    begun,
    decoder,
    dense,
    job,
    layers,
    least_memory_of,
    least_of,
    loss,
    many_classes,
)
from weft.errors import StrategyError, UserError
from weft.search.candidate import Candidate
from weft.search.evaluator import Evaluator
from weft.search.measures import Measures, Unplannable
from weft.search.space import space_of
from weft.strategy.strategy import Strategy


@cache
def every(topology: str) -> dict[Candidate, Measures]:
    """All candidates of the space of the two layers, planned and simulated, with no lower bounds."""
    found = begun(layers(), topology)
    measures = {}
    for candidate in space_of(found.facts, every_rank=False):
        strategy = candidate.strategy(found.facts.linears, Strategy(), found.facts.blocks)
        answer = found.evaluator.of(strategy)
        if isinstance(answer, Measures):
            measures[candidate] = answer
    return measures


@pytest.mark.parametrize("topology", ["h100x2", "flexflow-k80x4"])
def test_it_finds_what_trying_everything_finds(topology: str) -> None:
    """Lower bounds leave nothing out that would be the best; and none is above what a plan takes."""
    all_of_them = every(topology)
    best = min(each.seconds for each in all_of_them.values())
    found = weft.search(layers(), topology, moves=100)
    assert found.seconds <= best
    assert found.bound <= best
    assert 0 <= found.gap < 1
    lower_bounds = begun(layers(), topology).lower_bounds
    for candidate, measures in all_of_them.items():
        assert least_of(lower_bounds, candidate) <= measures.seconds, str(candidate)
        assert least_memory_of(lower_bounds, candidate) <= measures.memory, str(candidate)


def test_the_cheapest_layouts_are_among_the_first_that_are_tried() -> None:
    found = weft.search(many_classes(), "flexflow-p100x4", moves=8)
    assert found.best.parameters["2.weight"] == weft.split(0)
    by_hand = {each.name: each.seconds for each in found.tried if each.by_hand}
    # By hand, too, the classes are split; nothing else is as quick.
    split = by_hand.pop("data 4; vocabularies split")
    assert split is not None
    assert found.seconds <= split
    assert all(each is None or found.seconds < 0.5 * each for each in by_hand.values())


def test_no_strategy_by_hand_is_quicker() -> None:
    """Of a decoder with few samples, cut in stages too."""
    found = weft.search(decoder(), "h100x2", moves=12)
    for strategy in (
        weft.data_parallel(),
        Strategy(batch={"*": weft.split(0)}, parameters={"*": weft.broadcast}, zero=weft.Zero(3)),
        Strategy(batch={"*": weft.split(0)}, stages=2, micro_batches=4, schedule="1f1b"),
    ):
        assert found.seconds <= weft.simulate(decoder(), strategy, "h100x2").step_seconds
    table = str(found)
    assert table.startswith("best: ")
    assert all(each.why for each in found.tried if each.outcome == "slower")
    assert found.to_json()["tried"][0]["outcome"] == "best"


@pytest.mark.parametrize("topology", ["h100x4", "flexflow-p100x4"])
def test_floors_of_a_decoder_are_below_its_steps(topology: str) -> None:
    """Of candidates of all kinds, drawn: stages, tensor parallelism, split sequences, shards, recompute."""
    found = begun(decoder(4), topology)
    space = space_of(found.facts, every_rank=False)
    for candidate in random.Random(0).sample(list(space), 5):
        strategy = candidate.strategy(found.facts.linears, Strategy(), found.facts.blocks)
        answer = found.evaluator.of(strategy)
        assert isinstance(answer, Measures), f"{candidate}: {answer}"
        assert least_of(found.lower_bounds, candidate) <= answer.seconds, str(candidate)
        assert least_memory_of(found.lower_bounds, candidate) <= answer.memory, str(candidate)


def test_equal_arguments_give_equal_results() -> None:
    one, two = (weft.search(layers(), "v100x4", moves=12, seed=5) for _ in range(2))
    assert one == two
    assert sum(each.seconds is not None for each in one.tried) <= 12


def test_what_is_found_is_what_is_planned(tmp_path: Path) -> None:
    """The file says everything: it gives the same simulation."""
    found = weft.search(layers(), "flexflow-k80x4", moves=30)
    found.best.save(tmp_path / "best.yaml")
    again = Strategy.load(tmp_path / "best.yaml")
    assert again == found.best
    assert weft.simulate(layers(), again, "flexflow-k80x4") == found.simulation


def test_the_limit_holds() -> None:
    """Data parallel takes more than the limit; something that takes less is found, or the least is said."""
    plain = weft.simulate(layers(), weft.data_parallel(), "h100x2").memory
    least = min(each.memory for each in every("h100x2").values())
    assert plain is not None
    limit = (plain.total + least) // 2
    found = weft.search(layers(), "h100x2", memory_limit=limit, moves=100)
    assert found.simulation.memory is not None
    assert found.simulation.memory.total <= limit
    with pytest.raises(UserError, match=rf"fits {least - 1} bytes .* is {least} bytes \(.* GiB\)"):
        weft.search(layers(), "h100x2", memory_limit=least - 1, moves=400)
    with pytest.raises(UserError, match="parameters and states alone take more"):
        weft.search(layers(), "h100x2", memory_limit=1, moves=4)


def test_what_is_fixed_holds() -> None:
    fixed = Strategy(micro_batches=2, zero=weft.Zero(1), clip_norm=1.0)
    best = weft.search(layers(), "h100x4", fixed=fixed, moves=40).best
    assert (best.micro_batches, best.zero, best.clip_norm) == (2, weft.Zero(1), 1.0)
    with pytest.raises(StrategyError, match="ZeRO along axis 3"):
        weft.search(layers(), "h100x4", fixed=Strategy(zero=weft.Zero(1, 3)), moves=1)
    with pytest.raises(UserError, match="nothing"):
        weft.search(
            layers(), "h100x4", fixed=Strategy(parameters={"nothing": weft.broadcast}), moves=4
        )


def test_a_start_is_tried_first() -> None:
    start = Strategy(batch={"*": weft.split(0)}, micro_batches=4)
    found = weft.search(layers(), "h100x4", start=start, moves=1)
    assert [each.name for each in found.tried] == ["start"]
    assert found.best == start
    assert found.skipped["not reached with so many moves"] > 0


def test_a_program_with_a_searched_strategy_trains_as_plain_pytorch() -> None:
    """On threads: the losses of three steps, on every rank's part of what was found."""
    ours, plain = job(32, 16), job(32, 16)
    torch.manual_seed(1)
    batch = {"x": torch.randn(16, 32), "y": torch.randint(10, (16,))}
    expected, optimizer = [], plain.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    for _ in range(3):
        value = plain.loss_fn(plain.model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    with weft.local_world(2):
        program = weft.compile(
            *(ours.model, ours.loss_fn, ours.optimizer, batch),
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Auto(moves=12, fixed=Strategy(clip_norm=1e9)),
        )
        assert program.strategy.clip_norm == 1e9
        assert program.placement.shape == tuple(program.strategy.grid)
        assert [program.step(batch).item() for _ in range(3)] == pytest.approx(expected, rel=1e-5)
        program.close()


def test_a_strategy_of_another_grid_is_refused() -> None:
    ours = job(8, 4)
    with (
        weft.local_world(2),
        pytest.raises(
            StrategyError, match=r"grid of 4 ranks, the placement is 2; give weft\.placement"
        ),
    ):
        weft.compile(
            *(ours.model, ours.loss_fn, ours.optimizer, ours.example_batch),
            placement=weft.placement("cpu", [0, 1]),
            strategy=Strategy(grid=(4,)),
        )


def test_what_auto_does_not_do_is_refused() -> None:
    ours = job(8, 4)
    with weft.local_world(2):
        for strategy, batch, said in (
            ("quick", "whole", '"auto" or a weft.Auto'),
            ("auto", "local", "not supported yet"),
            (weft.Auto(seconds=1e9), "whole", "the other ranks wait"),
        ):
            with pytest.raises(UserError, match=said):
                weft.compile(
                    *(ours.model, ours.loss_fn, ours.optimizer, ours.example_batch),
                    placement=weft.placement("cpu", [0, 1]),
                    strategy=strategy,  # type: ignore[arg-type]
                    batch=batch,  # type: ignore[arg-type]
                )


def test_a_batch_norm_is_never_cut_into_micro_batches_unasked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    batch = {"x": torch.zeros(8, 6), "y": torch.zeros(8, dtype=torch.int64)}
    step = weft.Job(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch).stored()
    found = weft.search(step, "h100x2", moves=30)
    assert {each.strategy.micro_batches for each in found.tried} == {1}
    assert any("BatchNorm" in each for each in found.not_searched)
    asked = weft.search(step, "h100x2", moves=30, fixed=Strategy(micro_batches=2))
    assert {each.strategy.micro_batches for each in asked.tried} == {2}


def test_wide_layers_without_numbered_blocks_are_cut() -> None:
    """Few samples, large weights: gradients cost more than sums; a Megatron grid comes before all data parallelism."""
    step = job(width=1024, samples=8).stored()
    found = weft.search(step, "flexflow-k80x4", moves=6)
    hand = Strategy(
        batch={"*": weft.broadcast},
        parameters={"0.*": weft.split(0), "2.weight": weft.split(1), "2.bias": weft.broadcast},
    )
    assert found.seconds <= weft.simulate(step, hand, "flexflow-k80x4").step_seconds


def test_layers_without_numbered_blocks_have_pipelines_where_memory_is_tight() -> None:
    """Nothing but what keeps few micro-batches has room; each plan that lacks it says so of candidates alike."""
    with torch.device("meta"):
        model = dense(*[4096] * 9)
        batch = {"x": torch.empty(2048, 4096), "y": torch.empty(2048, dtype=torch.int64)}
    step = weft.Job(model, loss, torch.optim.AdamW(model.parameters()), batch).stored()
    hand = Strategy(
        batch={"*": weft.split(0)}, stages=4, micro_batches=8, schedule="zero_bubble", grid=(4,)
    )
    by_hand = weft.simulate(step, hand, "v100x4")
    assert by_hand.memory is not None
    limit = by_hand.memory.total * 1001 // 1000
    found = weft.search(step, "v100x4", moves=36, memory_limit=limit)
    assert found.seconds <= by_hand.step_seconds
    assert {"GPipe", "1F1B", "zero bubble"} <= {each.kind for each in found.why}


def test_small_steps_of_many_kinds_of_ranks_are_not_planned() -> None:
    """Rows of ten classes are uneven on four ranks: more than one rank is not like the others."""
    found = begun(layers(), "h100x4")
    strategy = Strategy(batch={"*": weft.broadcast}, parameters={"2.*": weft.split(0)})
    few = Evaluator(found.evaluator.step, found.evaluator.machine, found.evaluator.ranks, 1)
    refused = few.of(strategy)
    assert isinstance(refused, Unplannable)
    assert "ranks are not alike, more than the 1" in refused.why
    assert isinstance(found.evaluator.of(strategy), Measures)


def test_nothing_has_what_is_fixed() -> None:
    """Seven samples are no two micro-batches."""
    fixed = Strategy(micro_batches=2)
    with pytest.raises(UserError, match=r"no strategy on 4 ranks has all .* the 7 samples"):
        weft.search(job(samples=7).stored(), "h100x4", moves=2, fixed=fixed, every_rank=True)
    with pytest.raises(UserError, match=r"no strategy on 4 or 2 or 1 ranks"):
        weft.search(job(samples=7).stored(), "h100x4", moves=2, fixed=fixed)


def test_stages_in_turn_are_searched_and_moved() -> None:
    """More stages than rows of the grid: each row runs several, and layouts lie on what is left of it."""
    fixed = Strategy(stages=4, micro_batches=4, schedule="interleaved")
    result = weft.search(decoder(4), "h100x2", moves=12, fixed=fixed, planners=0)
    assert result.best.stages == 4 or len(result.best.stages) == 4  # type: ignore[arg-type]
    again = weft.simulate(decoder(4), result.best, "h100x2")
    assert again.step_seconds == result.seconds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step": 3}, "step must be the path of a graph file"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"moves": 0}, "moves must be the number of strategies to plan, from 1, got 0"),
        ({"moves": None, "seconds": 0}, "seconds must be a number above 0, such as 60, got 0"),
        ({"memory_limit": -1}, "memory_limit must be bytes, .*, got -1"),
        ({"planners": -1}, "planners must be the number of processes .*, from 0, got -1"),
        ({"planners": True}, "planners must be the number of processes .*, got True"),
        ({"every_rank": "yes"}, "every_rank must be True or False"),
        ({"told": None}, "told must be a function"),
        ({"topology": "h100y4"}, "h100y4"),
        ({"topology": 4}, "a topology is a name of the catalogue"),
        ({"fixed": Strategy(grid=(9,))}, r"has all that is fixed \(grid=\(9,\)\)"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"step": layers(), "topology": "h100x4", "moves": 1, **arguments}
    with pytest.raises(UserError, match=said):
        weft.search(**given)


def test_every_rank_takes_part_whatever_the_start() -> None:
    step, fixed = job(16, 4).stored(), Strategy(grid=(1,))
    alone = weft.search(step, "h100x2", moves=1, fixed=fixed, planners=0)
    for start in (alone, alone.best):
        found = weft.search(step, "h100x2", moves=2, every_rank=True, start=start, planners=0)
        assert prod(found.best.grid) == 2
        assert "the start: fewer ranks take part than must" in found.skipped
    one = weft.Stage(["*"], placement=weft.placement("cuda", [1]))
    with pytest.raises(UserError, match="stages of fixed= leave out some of 2 ranks"):
        weft.search(
            layers(), "h100x2", moves=1, every_rank=True, fixed=Strategy(stages=(one,)), planners=0
        )
