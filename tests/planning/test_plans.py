"""A step that went through a file is planned to the bit as `weft.compile` plans the step itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from compiler import micro_models as micro
from llama import Llama, long_batch, next_token_loss
from mixtures import Model as Mixtures
from mixtures import word_batch
from models import (
    GPT,
    GPT_COLUMNS,
    GPT_ROWS,
    ResNet,
    classification_loss,
    image_batch,
    token_batch,
    token_loss,
)
from weft.compiler.pass_cache import PassCache
from weft.errors import StrategyError
from weft.hardware import default_device
from weft.layout import Placement
from weft.planning.plans import plan_stored, planned_step, priced_step
from weft.planning.stored_step import StoredStep

DATA = weft.data_parallel()
STAGED = replace(DATA, stages=2, micro_batches=2)
EXPERTS = weft.Strategy(
    batch={"*": weft.split(0)},
    parameters={"layers.*.up": weft.split(0), "layers.*.down": weft.split(0), "*": weft.broadcast},
)
LSTM_IN_PIECES = weft.Strategy(
    batch={"*": weft.split(0)}, parameters={"lstm.*": weft.split(0), "*": weft.broadcast}
)
LINE, SQUARE = weft.placement("cpu", [0, 1, 2, 3]), weft.placement("cpu", [[0, 1], [2, 3]])


@dataclass(frozen=True)
class Case:
    """A model with its loss and batch, a strategy and a placement of four ranks."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batch: Callable[[], Mapping[str, Any]]
    strategy: weft.Strategy = DATA
    placement: Placement = LINE

    def job(self) -> weft.Job:
        torch.manual_seed(0)
        model = self.model()
        return weft.Job(
            model, self.loss, torch.optim.AdamW(model.parameters(), lr=0.1), self.batch()
        )

    def through_file(self, path: Path) -> StoredStep:
        self.job().stored("cpu", self.strategy).save(path)
        return StoredStep.load(path)


CASES = {
    "gpt, stages": Case(GPT, token_loss, token_batch, STAGED, SQUARE),
    "gpt, hybrid": Case(
        GPT, token_loss, token_batch, weft.hybrid_parallel(GPT_COLUMNS, GPT_ROWS), SQUARE
    ),
    "gpt, sharded": Case(
        GPT, token_loss, token_batch, replace(DATA, zero=weft.Zero(3), recompute=("blocks.*",))
    ),
    "gpt, half": Case(
        GPT, token_loss, token_batch, replace(DATA, precision="bf16", micro_batches=2)
    ),
    "llama": Case(Llama, next_token_loss, lambda: long_batch(n=4), replace(DATA, clip_norm=1.0)),
    "mixture": Case(Mixtures, token_loss, word_batch, EXPERTS),
    "convolutions": Case(ResNet, classification_loss, image_batch, STAGED, SQUARE),
    "recurrent": Case(micro.Recurrent, classification_loss, micro.sequences, LSTM_IN_PIECES),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_equal_those_of_compile(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    step, job = case.through_file(tmp_path / "a.graph"), case.job()
    found = plan_stored(step, case.strategy, case.placement, case.placement.ranks)
    with weft.local_world(4):
        program = weft.compile(
            job.model,
            job.loss_fn,
            job.optimizer,
            job.example_batch,
            placement=case.placement,
            strategy=case.strategy,
        )
        expected = program.plan
        program.close()
    assert str(found.plan) == str(expected)
    assert found.plan == expected


@pytest.mark.parametrize("name", ["gpt, stages", "gpt, sharded", "recurrent"])
def test_one_rank_of_each_class_is_planned_as_among_all(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    step = case.through_file(tmp_path / "a.graph")
    every = plan_stored(step, case.strategy, case.placement, case.placement.ranks)
    found = plan_stored(step, case.strategy, case.placement)
    assert found.fingerprint == every.fingerprint
    assert set(found.schedule.classes) == set(case.placement.ranks)
    stand = {plan.rank for plan in found.plan.ranks}
    assert stand == set(found.schedule.classes.values())
    assert found.plan.ranks == tuple(plan for plan in every.plan.ranks if plan.rank in stand)


def test_a_step_captured_for_one_device_is_planned_for_another(tmp_path: Path) -> None:
    """The file says that it is for CUDA, as one that another machine wrote does."""
    case = CASES["gpt, hybrid"]
    here = case.job().stored("cpu", case.strategy)
    replace(here, device_type="cuda").save(tmp_path / "a.graph")
    step = StoredStep.load(tmp_path / "a.graph")
    placement = weft.placement("cuda", [[0, 1], [2, 3]])
    found = plan_stored(step, case.strategy, placement)
    assert {value.layout.placement for value in found.graph.values.values() if value.layout} == {
        placement
    }


def test_another_precision_is_refused(tmp_path: Path) -> None:
    step = CASES["llama"].through_file(tmp_path / "a.graph")
    with pytest.raises(
        StrategyError, match=r"precision .*'bf16'.*captured for none; give.*--strategy"
    ):
        plan_stored(step, replace(DATA, precision="bf16"), LINE)


def test_other_recurrent_layers_in_pieces_are_refused(tmp_path: Path) -> None:
    case = CASES["recurrent"]
    step = case.through_file(tmp_path / "a.graph")
    assert step.apart
    with pytest.raises(StrategyError, match=r"lstm\.bias_hh_l0 of a recurrent layer whole"):
        plan_stored(step, DATA, LINE)
    whole = replace(case, strategy=DATA).through_file(tmp_path / "b.graph")
    with pytest.raises(StrategyError, match=r"lstm\.bias_hh_l0 of a recurrent layer split"):
        plan_stored(whole, LSTM_IN_PIECES, LINE)


def test_patterns_may_name_modules_without_ops(tmp_path: Path) -> None:
    """Only the file says that there is such a module: the graph does not show it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 4))
    batch = {"x": torch.empty(4, 8), "y": torch.empty(4, dtype=torch.int64)}
    job = weft.Job(model, classification_loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    job.stored().save(tmp_path / "a.graph")
    step = StoredStep.load(tmp_path / "a.graph")
    assert plan_stored(step, replace(DATA, recompute=("1",)), LINE).plan.ranks
    with pytest.raises(StrategyError, match="'3'"):
        plan_stored(step, replace(DATA, recompute=("3",)), LINE)


def test_plans_with_a_cache_are_those_without() -> None:
    """Of a chain of strategies, each with little of it different, and back again."""
    step, cache = CASES["gpt, stages"].job().stored(), PassCache(4)
    first, last = weft.placement("cpu", [0, 1]), weft.placement("cpu", [2, 3])
    staged = replace(
        DATA,
        stages=(
            weft.Stage(["tokens", "positions", "blocks.0"], first),
            weft.Stage(["blocks.1", "norm", "head"], last),
        ),
        micro_batches=2,
    )
    border = (
        weft.Stage(["tokens", "positions", "blocks.0", "blocks.1"], first),
        weft.Stage(["norm", "head"], last),
    )
    chain = [
        staged,
        replace(staged, stages=border),
        replace(staged, micro_batches=4),
        replace(staged, recompute=("blocks.0",)),
        replace(staged, zero=weft.Zero(1)),
        replace(staged, signatures={"mm": "B, B -> B"}),
        DATA,
        replace(DATA, zero=weft.Zero(3)),
        staged,
    ]
    for strategy in chain:
        found = plan_stored(step, strategy, LINE, cache=cache)
        full = plan_stored(step, strategy, LINE)
        assert found.plan == full.plan
        again, once = (planned_step(step.graph, each) for each in (found, full))
        costs = default_device("cpu")
        assert priced_step(again, costs).simulation == priced_step(once, costs).simulation
