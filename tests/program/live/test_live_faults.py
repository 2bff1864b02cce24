"""Writes, failures and replacements around a live model: seen, or told; nothing is lost silently."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from single_device import whole
from weft.errors import RankFailure, UserError
from weft.runtime.executor import optimizer as updates

RANKS = pytest.mark.parametrize("ranks", [1, 2])
Batch = dict[str, torch.Tensor]


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def batch_of(seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 6, generator=drawn).to(dtype),
        "y": torch.randint(4, (8,), generator=drawn),
    }


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)


def compiled(model: nn.Module, optimizer: Any, ranks: int, **options: Any) -> weft.Program:
    placement = weft.placement("cpu", list(range(ranks)))
    example = batch_of(0, model[0].weight.dtype)  # type: ignore[index, union-attr]
    return weft.compile(model, loss_fn, optimizer, example, placement=placement, **options)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.zero_(),
    "through data": lambda w: w.data.mul_(2),
    "to data": lambda w: setattr(w, "data", w.data * 2),
}


@RANKS
@pytest.mark.parametrize("write", WRITES)
def test_masters_follow_what_is_written(write: str, ranks: int) -> None:
    model = net(torch.bfloat16)
    strategy = weft.Strategy(batch={"*": weft.split(0)}, precision=weft.Precision(masters=True))
    with weft.local_world(ranks):
        program = compiled(
            model, torch.optim.SGD(model.parameters(), lr=0.0), ranks, strategy=strategy
        )
        program.step(batch_of(0, torch.bfloat16))
        with torch.no_grad():
            WRITES[write](model[0].weight)
        written = whole(model[0].weight).clone()
        program.step(batch_of(1, torch.bfloat16))
        assert torch.equal(whole(model[0].weight), written)
        program.close()


def test_a_check_leaves_masters_as_they_are() -> None:
    model = net(torch.bfloat16)
    strategy = weft.Strategy(batch={"*": weft.split(0)}, precision=weft.Precision(masters=True))
    with weft.local_world(2):
        program = compiled(model, adamw(model), 2, strategy=strategy)
        program.step(batch_of(0, torch.bfloat16))
        before = program.full_state_dict(masters=True)
        program.verify(batch_of(1, torch.bfloat16))
        after = program.full_state_dict(masters=True)
        program.close()
    assert before["0.weight"].dtype == torch.float32
    assert all(torch.equal(after[name], before[name]) for name in before)


def failing(patch: pytest.MonkeyPatch) -> None:
    def run(self: object, sources: object) -> None:
        raise ValueError("no memory")

    patch.setattr(updates.OptimizerUpdates, "run", run)


@RANKS
def test_an_update_that_fails_is_told_and_may_be_made_again(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    with weft.local_world(ranks):
        program = compiled(model, adamw(model), ranks)
        state = program.full_state_dict()
        program.step(batch_of(0), update=False)
        with monkeypatch.context() as patch:
            failing(patch)
            with pytest.raises(RankFailure, match="no memory"):
                program.update()
        with pytest.raises(RankFailure, match="had changed parameters or gradients on some ranks"):
            program.update()
        program.load_full_state_dict(state)
        plain = net()
        assert program.step(batch_of(1)).item() == pytest.approx(loss_fn(plain, batch_of(1)).item())
        program.step(batch_of(2), update=False)
        program.update()
        program.close()


def test_an_update_after_a_failed_step_looks_at_what_has_failed() -> None:
    model = net()
    bad = batch_of(0)
    bad["y"][-1] = 99
    with weft.local_world(2):
        program = compiled(model, adamw(model), 2)
        program.step(batch_of(0), update=False)
        kept = whole(model[0].weight.grad).clone()
        with pytest.raises(RankFailure, match="out of bounds"):
            program.step(bad, update=False)
        assert torch.equal(whole(model[0].weight.grad), kept)
        program.update()
        plain = net()
        optimizer = adamw(plain)
        loss_fn(plain, batch_of(0)).backward()
        optimizer.step()
        torch.testing.assert_close(whole(model[0].weight.detach()), plain[0].weight.detach())
        program.close()


@RANKS
def test_a_module_that_is_replaced_is_told(ranks: int) -> None:
    model = net()
    with weft.local_world(ranks):
        program = compiled(model, adamw(model), ranks)
        model[2] = nn.Linear(8, 4).double()
        with pytest.raises(UserError, match="2 was replaced by another module"):
            program.step(batch_of(0))
        program.close()


def test_gradients_stay_when_a_model_is_laid_anew() -> None:
    model = net()
    with weft.local_world(2):
        program = compiled(model, adamw(model), 2)
        program.step(batch_of(0), update=False)
        program.close()
        kept = whole(model[0].weight.grad).clone()
        strategy = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))
        again = compiled(model, adamw(model), 2, strategy=strategy)
        torch.testing.assert_close(whole(model[0].weight.grad), kept)
        again.close()


def test_a_failed_program_can_be_let_go() -> None:
    model = net()
    bad = batch_of(0)
    bad["y"][-1] = 99
    with weft.local_world(2):
        program = compiled(model, adamw(model), 2)
        with contextlib.suppress(RankFailure):
            program.step(bad)
        seen = weakref.ref(program)
        del program
        gc.collect()
        assert seen() is None
        strategy = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))
        compiled(model, adamw(model), 2, strategy=strategy).close()


def test_a_compile_that_is_refused_leaves_no_thread() -> None:
    model = net()
    optimizer = adamw(model)
    optimizer.state[model[0].weight] = {"exp_avg": torch.zeros(3)}
    with weft.local_world(2):
        compiled(net(), None, 2).close()
        before = threading.active_count()
        for _ in range(2):
            with pytest.raises(UserError, match="0.weight.exp_avg of shape"):
                compiled(model, optimizer, 2)
        assert threading.active_count() == before


@RANKS
def test_parameters_that_change_groups_take_their_options(ranks: int) -> None:
    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = net()
        groups = [
            {"params": [model[0].weight, model[0].bias], "lr": 0.1},
            {"params": [model[2].weight, model[2].bias], "lr": 0.0},
        ]
        return model, torch.optim.SGD(groups, lr=0.1)

    def exchange(optimizer: torch.optim.Optimizer) -> None:
        one, other = optimizer.param_groups
        one["params"], other["params"] = other["params"], one["params"]

    model, optimizer = make()
    plain, other = copy.deepcopy((model, optimizer))
    with weft.local_world(ranks):
        program = compiled(model, optimizer, ranks)
        for seed in range(3):
            if seed == 1:
                exchange(optimizer)
                exchange(other)
            program.step(batch_of(seed))
            other.zero_grad()
            loss_fn(plain, batch_of(seed)).backward()
            other.step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(whole(model.state_dict()[name]), value)
        program.close()


def test_states_that_are_merged_are_seen() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with weft.local_world(2):
        program = compiled(model, optimizer, 2)
        program.step(batch_of(0))
        weight = model[0].weight
        entries = optimizer.state[weight]
        entries |= {"momentum_buffer": torch.full((8, 6), 1e6, dtype=torch.float64)}
        program.step(batch_of(1))
        assert whole(weight.detach()).abs().min() > 1e4
        program.close()


def test_a_step_that_was_captured_once_takes_buckets() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()

    def tagged(model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    example = {"x": torch.ones(4, 5, dtype=torch.long), "y": torch.ones(4, 5, dtype=torch.long)}
    step = weft.Step(model, tagged, adamw(model), example)
    with weft.local_world(2):
        program = weft.compile(
            step,
            placement=weft.placement("cpu", [0, 1]),
            shapes=weft.Buckets((8,), {"x": 0, "y": -100}),
        )
        plain = tagged(net_of(model), example)
        assert program.step(example).item() == pytest.approx(plain.item())
        program.close()


def net_of(model: nn.Module) -> nn.Module:
    """An ordinary copy of a live model."""
    found = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
    found.load_state_dict({name: whole(x) for name, x in model.state_dict().items()})
    return found


@pytest.mark.parametrize("grid", [[1, 0], [2, 0, 1], [[3, 1], [2, 0]]])
@pytest.mark.parametrize("level", [1, 3])
def test_ranks_of_a_placement_in_any_order(grid: Any, level: Any) -> None:
    model = net()
    optimizer = adamw(model)
    plain, other = copy.deepcopy((model, optimizer))
    batch = {"x": torch.randn(12, 6, dtype=torch.float64), "y": torch.arange(12) % 4}
    placement = weft.placement("cpu", grid)
    rows = (weft.split(0), weft.broadcast)[: placement.axes]
    strategy = weft.Strategy(batch={"*": rows}, zero=weft.Zero(level))
    with weft.local_world(len(placement.ranks)):
        program = weft.compile(
            model, loss_fn, optimizer, batch, placement=placement, strategy=strategy
        )
        program.step(batch, update=False)
        program.update()
        program.step(batch)
        program.close()
        weft.release(model, optimizer)
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()
    for _ in range(3):
        other.zero_grad()
        loss_fn(plain, batch).backward()
        other.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


@RANKS
def test_hooks_of_modules_that_come_and_go(ranks: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, other = copy.deepcopy((model, optimizer))
    hooks: list[Any] = []

    def double(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return 2 * result

    with weft.local_world(ranks):
        program = compiled(model, optimizer, ranks)
        for seed in range(4):
            if seed == 1:
                hooks += [each[2].register_forward_hook(double) for each in (model, plain)]
            if seed == 3:
                for hook in hooks:
                    hook.remove()
            other.zero_grad()
            loss = loss_fn(plain, batch_of(seed))
            loss.backward()
            other.step()
            assert program.step(batch_of(seed)).item() == pytest.approx(loss.item())
        optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(weft.errors.CaptureError, match="hook"):
            program.step(batch_of(0))
        program.close()


def test_shared_memory_is_refused() -> None:
    model = net()
    with weft.local_world(2):
        program = compiled(model, adamw(model), 2)
        with pytest.raises(UserError, match="shared memory"):
            model.share_memory()
        program.close()


GRADIENT_WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda grad: grad.mul_(0),
    "through data": lambda grad: grad.data.mul_(0),
}


@RANKS
@pytest.mark.parametrize("write", GRADIENT_WRITES)
def test_wider_sums_follow_what_is_written_to_gradients(write: str, ranks: int) -> None:
    model = net(torch.bfloat16)
    strategy = weft.Strategy(batch={"*": weft.split(0)}, precision=weft.Precision(masters=True))
    with weft.local_world(ranks):
        program = compiled(
            model, torch.optim.SGD(model.parameters(), lr=1.0), ranks, strategy=strategy
        )
        before = whole(model[0].weight.detach()).clone()
        program.step(batch_of(0, torch.bfloat16), update=False)
        with torch.no_grad():
            for parameter in model.parameters():
                GRADIENT_WRITES[write](parameter.grad)  # type: ignore[arg-type]
        program.update()
        assert torch.equal(whole(model[0].weight.detach()), before)
        program.close()
