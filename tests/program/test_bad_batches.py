"""A batch that cannot be computed with leaves the program usable, unless parameters were updated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import weft
from models import GPT, token_batch, token_loss
from single_device import adamw
from weft.errors import BatchError, RankFailure
from weft.runtime.executor import optimizer as updates
from weft.runtime.executor.threads import ThreadExecutor

STRATEGIES = {
    "data": weft.data_parallel(),
    "sharded": weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
    "pipeline": weft.Strategy(stages=2, micro_batches=2),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> float:
    optimizer.zero_grad()
    loss = token_loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_after_a_bad_batch(ranks: int, name: str) -> None:
    if ranks == 1 and name == "pipeline":
        pytest.skip("a pipeline has two ranks")
    torch.manual_seed(0)
    model = GPT().double()
    plain = copy.deepcopy(model)
    own, other = adamw(model), adamw(plain)
    bad = token_batch(4, seed=9)
    bad["y"][3, -1] = 10_000
    with weft.local_world(ranks):
        placement = weft.placement("cpu", list(range(ranks)))
        program = weft.compile(
            model, token_loss, own, token_batch(4), placement=placement, strategy=STRATEGIES[name]
        )
        for seed in range(4):
            batch = token_batch(4, seed=seed)
            assert program.step(batch).item() == pytest.approx(train(plain, other, batch), rel=1e-9)
            with pytest.raises(RankFailure, match="out of bounds"):
                program.step(bad)
        state = program.full_state_dict()
        program.close()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_batch_without_values(name: str) -> None:
    model = GPT().double()
    batch = token_batch(4)
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        program = weft.compile(
            model, token_loss, adamw(model), batch, placement=placement, strategy=STRATEGIES[name]
        )
        with pytest.raises(BatchError, match="'x' is on the meta device and has no values"):
            program.step({**batch, "x": batch["x"].to("meta")})
        assert program.steps == 0
        program.step(batch)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("call", ["step", "update"])
def test_training_goes_on_after_an_interrupt(
    kind: type[BaseException], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a signal whose handler raises, in the first rank, before anything is updated."""
    torch.manual_seed(0)
    model = GPT().double()
    plain, batch = copy.deepcopy(model), token_batch(4)
    own, other = adamw(model), adamw(plain)
    run = ThreadExecutor._run

    def interrupted(self: ThreadExecutor, step: int) -> None:
        if self.plan.rank == 0 or call == "update":
            raise kind
        run(self, step)

    with weft.local_world(2) as world:
        # Where the other rank is a process, it hears of a failure.
        kinds = kind if 0 in world.ranks else (kind, RankFailure)
        program = weft.compile(
            model, token_loss, own, batch, placement=weft.placement("cpu", [0, 1])
        )
        for _ in range(2):
            loss = program.step(batch, update=False) if call == "update" else torch.empty(())
            with monkeypatch.context() as patch:
                patch.setattr(ThreadExecutor, "_run", interrupted)
                with pytest.raises(kinds):
                    program.update() if call == "update" else program.step(batch)
            if call == "update":
                program.update()
            else:
                loss = program.step(batch)
            assert loss.item() == pytest.approx(train(plain, other, batch), rel=1e-9)
        program.close()


def test_training_goes_on_after_a_failure_that_came_between_steps() -> None:
    """As where another process fails at the beginning of a step that this one has not begun."""
    torch.manual_seed(0)
    model = GPT().double()
    plain, batch = copy.deepcopy(model), token_batch(4)
    own, other = adamw(model), adamw(plain)
    with weft.local_world(2):
        program = weft.compile(
            model, token_loss, own, batch, placement=weft.placement("cpu", [0, 1])
        )
        program.step(batch)
        next(iter(program._core.executors.values()))._fail(RankFailure("rank 1 failed"))
        with pytest.raises(RankFailure, match="rank 1 failed"):
            program.step(batch)
        loss = program.step(batch).item()
        program.close()
    train(plain, other, batch)
    assert loss == pytest.approx(train(plain, other, batch), rel=1e-9)


def test_a_half_made_update_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT().double()
    batch = token_batch(4)
    with weft.local_world(2):
        program = weft.compile(
            model, token_loss, adamw(model), batch, placement=weft.placement("cpu", [0, 1])
        )
        before = program.full_state_dict()
        program.step(batch)
        with monkeypatch.context() as patch:

            def run(self: object, sources: object) -> None:
                raise ValueError("no memory")

            patch.setattr(updates.OptimizerUpdates, "run", run)
            with pytest.raises(RankFailure, match="no memory"):
                program.step(batch)
        with pytest.raises(
            RankFailure, match="had changed parameters or gradients on some ranks.*no memory"
        ):
            program.step(batch)
        program.load_full_state_dict(before)
        assert program.step(batch).item() == pytest.approx(token_loss_of(before, batch), rel=1e-9)
        program.close()


def token_loss_of(state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> float:
    model = GPT().double()
    model.load_state_dict(state)
    return token_loss(model, batch).item()
