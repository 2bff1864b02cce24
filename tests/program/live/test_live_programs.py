"""Programs that share a live model, one after another or at once; and how a model becomes live, and plain again."""

from __future__ import annotations

import copy
import gc
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import weft
from program.live_models import PAIR, STRATEGIES, Net, Twins, batch, eager_step, loss_fn, twins
from single_device import adamw, assert_same_state, whole, whole_state
from weft.errors import LayoutError, UserError

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def compiled(both: Twins, name: str, **changes: Any) -> weft.Program:
    """Another program of the live model."""
    grid, strategy = STRATEGIES[name]
    return weft.compile(
        both.model,
        loss_fn,
        both.optimizer,
        batch(0),
        placement=weft.placement("cpu", grid),
        strategy=replace(strategy, **changes),
    )


@every_strategy
def test_two_programs_in_turns(name: str) -> None:
    with twins(name) as both:
        first, second = both.program, compiled(both, name, recompute=["*"])
        for both.program in (first, second, second, first):
            both.step()
        both.check()
        first.close()
        both.program = second
        both.step()
        both.check()


@every_strategy
def test_an_evaluation_sees_every_change(name: str) -> None:
    def logits(model: nn.Module, given: Any) -> torch.Tensor:
        found: torch.Tensor = model(given["x"])
        return found

    with twins(name) as both:
        evaluation = both.program.evaluation(logits, batch(9))
        for _ in range(2):
            both.step()
            both.eager_step()
            both.plain.eval()
            expected = both.plain(batch(9)["x"]).detach()
            both.plain.train()
            torch.testing.assert_close(evaluation.step(batch(9)), expected)


def test_other_layouts_while_a_program_is_open_are_refused() -> None:
    with twins("zero 3") as both:
        both.step()
        for strategy in (
            weft.Strategy(batch={"*": weft.split(0)}, stages=2),
            weft.Strategy(parameters={"first.weight": weft.split(1)}),
        ):
            with pytest.raises(UserError, match="another program that is open"):
                weft.compile(
                    both.model,
                    loss_fn,
                    both.optimizer,
                    batch(0),
                    placement=weft.placement("cpu", PAIR),
                    strategy=strategy,
                )
        with pytest.raises(UserError, match="an open program works with"):
            weft.release(both.model, both.optimizer)
        both.step()
        both.check()


@pytest.mark.parametrize("name", ["one rank", "zero 3", "pipeline"])
@pytest.mark.parametrize("by", ["release", "another program"])
def test_a_closed_program_says_that_it_has_no_values_any_more(by: str, name: str) -> None:
    """Once the model was given back and trained on, or lies elsewhere for another program."""
    with twins(name) as both:
        both.step()
        one = both.program
        one.close()
        assert_same_state(one.full_state_dict(), both.plain.state_dict(), 1e-9)
        if by == "release":
            weft.release(both.model, both.optimizer)
            both.eager_step()
            if name == "one rank":  # its tensors were plain all the time
                assert_same_state(one.full_state_dict(), both.plain.state_dict(), 1e-9)
                return
        else:
            other = "data" if name == "zero 3" else "zero 3"
            if name == "one rank":
                return
            both.program = compiled(both, other)
            both.step()
        for call in (
            one.full_state_dict,
            one.full_optimizer_state_dict,
            lambda: one.load_full_state_dict(both.plain.state_dict()),
            lambda: one.evaluation(loss_fn, batch(0)),
        ):
            with pytest.raises(UserError, match="was released or moved to another layout since"):
                call()
        both.eager_step()
        both.check()


@pytest.mark.one_process("a job of processes has one number of ranks")
@pytest.mark.parametrize("close", ["closed", "forgotten"])
def test_a_model_is_laid_anew(close: str) -> None:
    """From strategy to strategy, on other numbers of ranks, with the states of the optimizer."""
    names = [*STRATEGIES, "one rank", "pipeline", "data"]
    with twins(names[0]) as both:
        both.step()
    for name in names[1:]:
        with weft.local_world(torch.tensor(STRATEGIES[name][0]).numel()):
            both.program = compiled(both, name)
            both.step()
            both.eager_step()
            both.step()
            both.check()
            if close == "closed":
                both.program.close()
            else:
                del both.program
                gc.collect()


@every_strategy
def test_a_model_is_given_back(name: str) -> None:
    with twins(name) as both:
        both.step(2)
        parameters = list(both.model.parameters())
        both.program.close()
        weft.release(both.model, both.optimizer)
        assert all(type(parameter) is nn.Parameter for parameter in both.model.parameters())
        assert all(map(operator.is_, both.model.parameters(), parameters))
        assert not any(isinstance(x, weft.GlobalTensor) for x in both.model.buffers())
    both.eager_step()
    both.check()
    copy.deepcopy(both.model).half()
    both.model.last.weight = nn.Parameter(torch.zeros_like(both.model.last.weight))
    with weft.local_world(torch.tensor(STRATEGIES[name][0]).numel()):
        both.plain.load_state_dict(whole_state(both.model))
        both.optimizer, both.other = adamw(both.model), adamw(both.plain)
        both.program = compiled(both, name)
        both.step(2)
        both.check()


@pytest.mark.parametrize("name", ["data", "zero 3", "pipeline"])
def test_a_distributed_module_is_taken_as_it_lies_or_laid_anew(name: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    plain = copy.deepcopy(model)
    grid, strategy = STRATEGIES[name]
    with weft.local_world(2):
        placement = weft.placement("cpu", grid)
        weft.distribute(model, placement, {"first.weight": weft.split(1)})
        optimizer, other = adamw(model), adamw(plain)
        eager_step(model, optimizer, batch(1))
        program = weft.compile(
            model, loss_fn, optimizer, batch(0), placement=placement, strategy=strategy
        )
        for seed in (2, 3):
            program.step(batch(seed))
        for seed in (1, 2, 3):
            eager_step(plain, other, batch(seed))
        assert_same_state(whole_state(model), plain.state_dict(), 1e-9)
        program.close()


def replaced(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))


def assigned(model: Net) -> None:
    state = {key: value.clone() for key, value in whole_state(model).items()}
    model.load_state_dict(state, assign=True)


def buffer_replaced(model: Net) -> None:
    model.norm.running_mean = torch.zeros(8, dtype=torch.float64)


def removed(model: Net) -> None:
    model.last.bias = None


def last_deleted(model: Net) -> None:
    del model.last.bias


@pytest.mark.parametrize("change", [replaced, assigned, buffer_replaced, removed, last_deleted])
@pytest.mark.parametrize("name", ["one rank", "data", "pipeline"])
def test_tensors_that_are_replaced_are_named(name: str, change: Callable[[Net], None]) -> None:
    named = {"buffer_replaced": r"norm\.running_mean", "removed": r"last\.bias"}
    named["last_deleted"] = named["removed"]
    with twins(name) as both:
        both.step()
        change(both.model)
        gone = change in (removed, last_deleted)
        words = named.get(change.__name__, r"first\.weight")
        words += (
            " was removed .*old value; .*close"
            if gone
            else " was replaced by another tensor .*copy_"
        )
        for call in (lambda: both.program.step(batch(1)), both.program.update):
            with pytest.raises(UserError, match=words):
                call()


@pytest.mark.parametrize("name", ["one rank", "data"])
def test_a_module_that_is_replaced_is_named(name: str) -> None:
    with twins(name) as both:
        both.step()
        both.model.norm = nn.Identity()
        with pytest.raises(
            UserError, match=r"norm was replaced by another module .*old value; .*close"
        ):
            both.program.step(batch(1))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("name", ["one rank", "data"])
def test_a_parametrization_that_comes_later_is_refused(name: str) -> None:
    with twins(name) as both:
        both.step()
        with pytest.raises(UserError, match=r"weft\.release\(model\).* compile again"):  # noqa: PT012
            register_parametrization(both.model.first, "weight", Doubled())
            both.program.step(batch(1))


@pytest.mark.parametrize("name", ["one rank", "data"])
def test_a_module_that_comes_later_is_no_part_of_the_step(name: str) -> None:
    with twins(name) as both:
        both.step()
        both.model.last.later = nn.Linear(2, 2)
        both.model.later = nn.Linear(2, 2)
        both.step()
        replaced(both.model)
        with pytest.raises(UserError, match=r"first\.weight was replaced"):
            both.program.step(batch(1))


@pytest.mark.parametrize("name", ["one rank", "data"])
def test_one_number_that_is_replaced_by_an_equal_one_is_named(name: str) -> None:
    with twins(name) as both:
        both.step()
        tracked = whole_state(both.model)["norm.num_batches_tracked"]
        both.model.norm.num_batches_tracked = tracked.clone()
        with pytest.raises(UserError, match=r"num_batches_tracked was replaced"):
            both.program.step(batch(1))


@pytest.mark.parametrize("name", ["one rank", "data", "pipeline"])
def test_a_conversion_is_refused(name: str) -> None:
    def convert(both: Twins) -> None:
        both.model.half()
        both.program.step(batch(1))

    with twins(name) as both:
        both.step()
        with pytest.raises(UserError, match=r"weft.release\(model\)"):
            convert(both)


@every_strategy
def test_what_users_put_on_parameters_stays(name: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    scaled: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        scaled.append(gradient)
        return gradient * 0.5

    model.first.weight.note = "mine"  # type: ignore[attr-defined]
    model.first.weight.register_hook(hook)
    (loss_fn(model, batch(3)) * 2).backward()
    optimizer = adamw(model)
    plain = copy.deepcopy(model)
    plain.first.weight.register_hook(hook)
    for one, live in zip(plain.parameters(), model.parameters(), strict=True):
        one.grad = live.grad.clone()  # type: ignore[union-attr]
    other = adamw(plain)
    grid, strategy = STRATEGIES[name]
    with weft.local_world(torch.tensor(grid).numel()):
        program = weft.compile(
            model,
            loss_fn,
            optimizer,
            batch(0),
            placement=weft.placement("cpu", grid),
            strategy=strategy,
        )
        assert model.first.weight.note == "mine"  # type: ignore[attr-defined]
        for live, one in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(live.grad), one.grad)
        model.zero_grad()
        plain.zero_grad()
        program.step(batch(1))
        eager_step(plain, other, batch(1))
        scaled.clear()
        eager_step(model, optimizer, batch(2))
        assert len(scaled) == 1
        eager_step(plain, other, batch(2))
        assert_same_state(whole_state(model), plain.state_dict(), 1e-9)
        program.close()
        weft.release(model, optimizer)
        assert model.first.weight.note == "mine"  # type: ignore[attr-defined]
        eager_step(model, optimizer, batch(3))
        eager_step(plain, other, batch(3))
        assert_same_state(whole_state(model), plain.state_dict(), 1e-9)


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_a_loss_of_before_may_be_held(name: str) -> None:
    """What is done stays done; a graph that still waits for its backward is told."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = adamw(model)
    done = loss_fn(model, batch(3))
    done.backward()
    optimizer.step()
    optimizer.zero_grad()
    with twins(name, lambda: model, lambda _: optimizer) as both:
        both.step(2)
        both.check()
    assert done.grad_fn is not None


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_a_graph_that_needs_the_values_of_before_is_told(name: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    before = copy.deepcopy(model.state_dict())
    waiting = loss_fn(model, batch(3))
    words = "norm.weight cannot be moved to the program, as an autograd graph needs its values"
    with pytest.raises(UserError, match=words), twins(name, lambda: model):
        pass
    assert all(type(x) is nn.Parameter for x in model.parameters())
    assert all(type(x) is torch.Tensor for x in model.buffers())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key])
    waiting.backward()
    model.zero_grad()
    with twins(name, lambda: model) as both:
        both.step()
        both.check()


def test_only_tensors_of_one_model_meet_across_its_stages():
    """Others on the same placements do not mix, and what is on one of them may meet a parameter there."""
    with twins("pipeline") as pair:
        first, last = pair.model.first.weight.detach(), pair.model.last.weight.detach()
        assert first.placement != last.placement
        assert whole(first.norm() + last.norm()) == pytest.approx(
            (pair.plain.first.weight.norm() + pair.plain.last.weight.norm()).item()
        )
        here, there = (
            weft.ones((), dtype=first.dtype, placement=x.placement, sbp=weft.broadcast)
            for x in (first, last)
        )
        with pytest.raises(LayoutError, match="operands on different placements"):
            here + there
        with pytest.raises(LayoutError, match="operands on different placements"):
            first + there
        beside = here + first  # of the model from then on
        assert torch.equal(
            whole(beside.sum() + last.sum()), whole(beside).sum() + whole(last).sum()
        )
