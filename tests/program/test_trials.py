"""Strategies that run for real before one is taken: they leave model, optimizer and batch as they are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from on_ranks import passed
from weft.errors import RankFailure, RuleError, StrategyError, UserError
from weft.layout import Placement
from weft.program.agreement import TrialFailure
from weft.program.planning.auto import Trials
from weft.program.planning.step import Step
from weft.strategy.strategy import Strategy, data_parallel

TWO = Placement("cpu", (2,), (0, 1))
SCRIPT = Path(__file__).with_name("trials_on_processes.py")
SHARDED = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))


class Net(nn.Module):
    """Buffers that a step writes, a mask that it reads, and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Linear(8, 4),
        )
        self.register_buffer("mask", torch.tensor([True, False] * 4))

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))) * self.mask)


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parts(device="cpu"):
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6), "y": torch.randint(0, 4, (8,))}
    with torch.device(device):
        model = Net()
    return model, loss, torch.optim.AdamW(model.parameters(), lr=0.1), batch


@pytest.mark.parametrize("strategy", [data_parallel(), SHARDED], ids=["data", "zero 3"])
def test_a_trial_changes_nothing(strategy):
    model, loss_fn, optimizer, batch = parts()
    before = copy.deepcopy((model.state_dict(), batch))
    with weft.local_world(2) as world:
        trials = Trials(world, Step(model, loss_fn, optimizer, batch), "aten")
        assert 0 < trials.seconds(strategy, TWO) < 1
    torch.testing.assert_close((model.state_dict(), batch), before, rtol=0, atol=0)
    assert not optimizer.state
    assert all(type(each) is nn.Parameter for each in model.parameters())
    loss_fn(model, batch).backward()


def test_a_model_without_values_can_be_tried():
    model, loss_fn, optimizer, batch = parts("meta")
    meta = {name: leaf.to("meta") for name, leaf in batch.items()}
    with weft.local_world(2) as world:
        assert (
            Trials(world, Step(model, loss_fn, optimizer, meta), "aten").seconds(SHARDED, TWO) > 0
        )
    assert all(each.is_meta for each in model.parameters())


def test_the_fastest_is_taken_and_the_first_of_equals(monkeypatch):
    took = {1: 3.0, 2: 1.0, 3: RuleError("no rule"), 4: 1.0}

    def seconds(self, strategy, placement):
        found = took[strategy.micro_batches]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(Trials, "seconds", seconds)
    candidates = [(Strategy(micro_batches=number), TWO) for number in took]
    with weft.local_world(2) as world:
        trials = Trials(world, Step(*parts()), "aten")
        assert trials.fastest(candidates) == candidates[1]
        with pytest.raises(RuleError, match="no rule"):
            trials.fastest(candidates[2:3])


@pytest.mark.parametrize(
    ("took", "taken"),
    [
        # What disturbs one trial decides nothing, and what is far from the fastest runs once.
        ([[1.1, 0.9, 0.9], [1.0, 1.0, 1.0], [1.3]], 0),
        # The second is 2 % faster: that counts where trials come out alike at once.
        ([[1.0, 1.001], [0.98, 0.981]], 1),
        # Or after some rounds, in which it shows that one trial was disturbed.
        ([[1.0, 1.1, 1.001], [1.1, 0.98, 0.985]], 1),
        # It counts for nothing where they differ in every round: the one simulated quickest is taken.
        ([[1.0, 1.4, 1.06, 1.2, 1.3], [0.98, 1.4, 1.2, 1.3, 1.05]], 0),
    ],
    ids=["a disturbed one", "alike", "after some rounds", "never"],
)
def test_candidates_near_the_fastest_run_until_trials_tell_them_apart(monkeypatch, took, taken):
    left = {number: iter(each) for number, each in enumerate(took, start=2)}
    monkeypatch.setattr(
        Trials, "seconds", lambda _, strategy, __: next(left[strategy.micro_batches])
    )
    candidates = [(Strategy(micro_batches=number), TWO) for number in left]
    with weft.local_world(2) as world:
        trials = Trials(world, Step(*parts()), "aten")
        assert trials.fastest(candidates) == candidates[taken]
    assert [next(each, "all") for each in left.values()] == ["all"] * len(took)


def test_a_strategy_that_says_more_must_be_quicker_by_more(monkeypatch):
    took = {1: 0.96, 2: 1.0}
    monkeypatch.setattr(Trials, "seconds", lambda _, strategy, __: took[strategy.micro_batches])
    alone = {f"{number}.weight": weft.split(0) for number in range(3)}
    candidates = [(Strategy(parameters=alone), TWO), (Strategy(micro_batches=2), TWO)]
    with weft.local_world(2) as world:
        trials = Trials(world, Step(*parts()), "aten")
        assert trials.fastest(candidates) == candidates[0]
        took[1] = 0.98
        assert trials.fastest(candidates) == candidates[1]
        assert trials.fastest(candidates[::-1]) == candidates[1]


def test_a_search_that_measures_equals_plain_pytorch():
    model, loss_fn, optimizer, batch = parts()
    plain, plainly = copy.deepcopy((model, optimizer))
    auto = weft.Auto(moves=4, measure=2, fixed=Strategy(clip_norm=1.0))
    with weft.local_world(2):
        program = weft.compile(model, loss_fn, optimizer, batch, placement=TWO, strategy=auto)
        assert program.strategy.clip_norm == 1.0
        for _ in range(3):
            expected = loss_fn(plain, batch)
            expected.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            plainly.step()
            plainly.zero_grad()
            torch.testing.assert_close(program.step(batch), expected.detach())
        state = program.full_state_dict()
        program.close()
    torch.testing.assert_close(state, plain.state_dict())


def test_a_candidate_that_fails_while_it_runs_is_left_out(monkeypatch):
    variables, made = Trials._variables, []

    def lacking(self, graph, rank):
        made.append(rank)
        if rank == 1 and made.count(1) == 1:
            raise MemoryError("no room for copies")
        return variables(self, graph, rank)

    monkeypatch.setattr(Trials, "_variables", lacking)
    candidates = [(data_parallel(), TWO), (SHARDED, TWO)]
    with weft.local_world(2) as world:
        assert Trials(world, Step(*parts()), "aten").fastest(candidates) == candidates[1]
    assert made == [*world.ranks] * 2


def test_one_that_fails_when_it_runs_again_is_left_out(monkeypatch):
    took = {1: iter([1.0]), 2: iter([1.1, 1.1])}

    def seconds(self, strategy, placement):
        found = next(took[strategy.micro_batches], None)
        if found is None:
            raise TrialFailure("no room")
        return found

    monkeypatch.setattr(Trials, "seconds", seconds)
    candidates = [(Strategy(micro_batches=number), TWO) for number in took]
    with weft.local_world(2) as world:
        assert Trials(world, Step(*parts()), "aten").fastest(candidates) == candidates[1]


def words():
    """A table of 4 rows, and a batch whose last row asks for others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4))
    ids = torch.zeros(8, dtype=torch.int64)
    return model, loss, torch.optim.SGD(model.parameters(), lr=0.1), {"x": ids + 9, "y": ids}


def test_batches_without_sense_are_told_and_do_no_harm():
    model, loss_fn, optimizer, batch = words()
    before = copy.deepcopy(model.state_dict())
    with weft.local_world(2):
        with pytest.raises(RankFailure, match=r"no candidate ran; .* IndexError: .* give such a"):
            weft.compile(
                *(model, loss_fn, optimizer, batch),
                placement=TWO,
                strategy=weft.Auto(moves=4, measure=2),
            )
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        auto = weft.Auto(moves=4)
        program = weft.compile(model, loss_fn, optimizer, batch, placement=TWO, strategy=auto)
        assert program.step({"x": batch["y"], "y": batch["y"]}).item() > 0
        program.close()


def test_no_candidate_is_run_without_room(monkeypatch):
    """The bare layouts of the best were not planned by the search: they take more than there may be."""
    ran = []
    fastest = Trials.fastest
    monkeypatch.setattr(
        Trials, "fastest", lambda self, found: ran.extend(found) or fastest(self, found)
    )
    model, loss_fn, optimizer, batch = wide()
    step = Step(model, loss_fn, optimizer, batch)
    held = {}
    for level in (0, 3):
        zero = weft.Zero(level) if level else None
        strategy = weft.Strategy(batch={"*": weft.split(0)}, zero=zero)
        memory = weft.simulate(step.stored(), strategy, "h100x2").memory
        held[level] = memory.total - memory.reserve
    limit = (held[0] + held[3]) // 2
    with weft.local_world(2):
        auto = weft.Auto(moves=8, measure=3, memory_limit=limit)
        program = weft.compile(step, placement=TWO, strategy=auto)
        assert program.strategy.memory_limit is None
        program.close()
    assert len(ran) > 1
    for strategy, placement in ran:
        assert strategy.memory_limit is None
        with weft.local_world(2):
            made = weft.compile(step, placement=placement, strategy=strategy)
            assert max(each.predicted.peak for each in made.memory()) <= limit
            made.close()


def wide():
    """Parameters that take far more than activations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, loss, optimizer, parts()[-1]


@pytest.mark.one_process("two ranks of four have nothing to do")
@pytest.mark.parametrize("ranks", [[2, 3], [3, 1]])
def test_fixed_stages_name_ranks_of_the_placement(ranks):
    model, loss_fn, optimizer, batch = parts()
    plain = loss_fn(copy.deepcopy(model), batch).item()
    placement = weft.placement("cpu", ranks)
    first, last = (weft.placement("cpu", [rank]) for rank in ranks)
    stages = [weft.Stage(["first", "norm"], first), weft.Stage(["*"], last)]
    auto = weft.Auto(moves=2, measure=2, fixed=Strategy(stages=stages))
    with weft.local_world(4):
        program = weft.compile(model, loss_fn, optimizer, batch, placement=placement, strategy=auto)
        assert tuple(program.strategy.stages) == tuple(stages)
        assert program.step(batch).item() == pytest.approx(plain)
        program.close()


@pytest.mark.one_process("two ranks of four have nothing to do")
def test_fixed_stages_elsewhere_are_refused():
    stages = [weft.Stage(["*"], weft.placement("cpu", [3]))]
    auto = weft.Auto(moves=2, fixed=Strategy(stages=stages))
    with (
        weft.local_world(4),
        pytest.raises(StrategyError, match=r"stage 0 of fixed= runs on rank 3, .* cpu \[0, 1\]"),
    ):
        weft.compile(*parts(), placement=TWO, strategy=auto)


def test_a_second_program_lies_as_the_first():
    """A search for an evaluation of a model that an open program holds takes what fits that one."""
    model, loss_fn, optimizer, batch = parts()
    auto = weft.Auto(moves=6)
    with weft.local_world(2):
        alone = weft.compile(*parts()[:2], None, batch, placement=TWO, strategy=auto)
        assert (alone.strategy.parameters, alone.strategy.batch) != (
            data_parallel().parameters,
            data_parallel().batch,
        )
        alone.close()
        first = weft.compile(model, loss_fn, optimizer, batch, placement=TWO)
        second = weft.compile(model, loss_fn, None, batch, placement=TWO, strategy=auto)
        assert second.strategy.parameters == data_parallel().parameters
        before = second.step(batch).item()
        first.step(batch)
        assert second.step(batch).item() != before
        second.close()
        first.close()


def test_a_second_program_that_cannot_lie_as_the_first_is_told():
    model, loss_fn, optimizer, batch = parts()
    stages = [
        weft.Stage(["first"], weft.placement("cpu", [1])),
        weft.Stage(["*"], weft.placement("cpu", [0])),
    ]
    with weft.local_world(2):
        first = weft.compile(
            *(model, loss_fn, optimizer, batch), placement=TWO, strategy=Strategy(stages=stages)
        )
        with pytest.raises(UserError, match=r"none has the layouts .* first.weight .* close it"):
            weft.compile(*(model, loss_fn, None, batch), placement=TWO, strategy=weft.Auto(moves=3))
        assert first.step(batch).item() > 0
        first.close()


@pytest.mark.slow
def test_ranks_go_on_after_a_candidate_that_failed_on_one():
    for output in passed(SCRIPT, 2, seconds=150):
        assert "no candidate ran; the first failed with rank " in output
        assert "IndexError" in output
        assert output.endswith("trained\n")


def test_what_is_fixed_is_a_strategy():
    with (
        weft.local_world(1),
        pytest.raises(StrategyError, match=r"weft.Auto: fixed must be .* got 'a'"),
    ):
        weft.compile(
            *parts(), placement=Placement("cpu", (1,), (0,)), strategy=weft.Auto(fixed="a")
        )


@pytest.mark.parametrize("measure", [-1, 1.5, True, "3"])
def test_a_wrong_number_to_measure_is_refused(measure):
    with weft.local_world(1), pytest.raises(StrategyError, match="measure must be the number"):
        weft.compile(
            *parts(), placement=Placement("cpu", (1,), (0,)), strategy=weft.Auto(measure=measure)
        )
