"""Live parameters that are stored in shares: whoever reads or writes them sees the order that users know."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft
from program import live_models
from program.live_models import DATA, GRID, PAIR, STRATEGIES, Twins, batch, loss_fn, twins
from single_device import adamw, assert_same_state, whole, whole_state
from weft.errors import UserError
from weft.ir.logical import Input

WIDTH, HEADS, KV, INNER = 8, 4, 2, 12
COLUMNS, ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.out", "blocks.*.down")
TENSOR = weft.tensor_parallel(COLUMNS, ROWS)
HYBRID = weft.hybrid_parallel(COLUMNS, ROWS)
SHARED: dict[str, tuple[Any, weft.Strategy]] = {
    "tensor": (PAIR, TENSOR),
    "hybrid, zero 1": (GRID, replace(HYBRID, zero=weft.Zero(1))),
    "hybrid, zero 3": (GRID, replace(HYBRID, zero=weft.Zero(3))),
    "stages": (GRID, replace(TENSOR, stages=2, micro_batches=2)),
}
every_strategy = pytest.mark.parametrize("name", SHARED)


class Block(nn.Module):
    """Attention with fewer keys than queries, and a gated layer, each of one joined matrix."""

    def __init__(self) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.parts = (WIDTH, KV * each, KV * each)
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.parts)), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.qkv(x).split(self.parts, dim=2)
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in pieces)
        k, v = (y.repeat_interleave(HEADS // KV, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, value = self.up(x).chunk(2, dim=-1)
        found: Tensor = x + self.down(F.silu(gate) * value)
        return found


class Joined(nn.Module):
    """Two blocks: [n, 6] -> [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.unflatten(-1, (2, 3)))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x.mean(1))
        return found


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)


def one_by_one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)


def lists(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


OPTIMIZERS = (adamw, fused, one_by_one, lists, momentum)


@contextmanager
def shared(name: str, **options: Any) -> Iterator[Twins]:
    """Twins whose joined matrices are in shares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STRATEGIES, name, SHARED[name])
        with twins(name, Joined, **options) as both:
            check_shares(both)
            yield both


def check_shares(both: Twins) -> None:
    for key, parameter in both.model.named_parameters():
        if ".qkv." in key or ".up." in key:
            assert parameter.shares is not None, key  # type: ignore[attr-defined]
            if found := in_turn(parameter):  # not of other stages
                assert not torch.equal(torch.cat(found), both.plain.get_parameter(key))
    stored = {node.key for node in both.program.graph.of_kind(Input) if node.shares}
    assert {"blocks.0.qkv.weight", "blocks.1.up.bias"} <= stored


def in_turn(parameter: Any) -> list[Tensor]:
    """Local tensors of different ranks, one behind the other."""
    found = {id(part): part for part in parameter.locals[:2]}
    return list(found.values())


def joined(model: nn.Module) -> list[Tensor]:
    return [x for key, x in model.named_parameters() if ".qkv." in key or ".up." in key]


@every_strategy
def test_training(name: str) -> None:
    with shared(name) as both:
        assert_same_state(whole_state(both.model), both.plain.state_dict(), 0.0)
        both.step(3)
        both.check()
        check_shares(both)
        assert_same_state(both.program.full_state_dict(), both.plain.state_dict(), 1e-9)


def test_states_and_gradients_are_stored_as_their_parameters() -> None:
    with shared("tensor") as both:
        both.step()
        both.program.step(batch(3), update=False)
        for parameter in joined(both.model):
            state = both.optimizer.state[parameter]
            assert state["exp_avg"].shares == parameter.grad.shares == parameter.shares  # type: ignore[union-attr, attr-defined]


@every_strategy
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_eager_steps_between(name: str, make: Any) -> None:
    with shared(name, make_optimizer=make) as both:
        both.eager_step()
        both.step()
        both.eager_step()
        both.eager_step()
        both.step()
        both.check()


def clamped(model: Joined, _: Any) -> None:
    with torch.no_grad():
        for parameter in joined(model):
            parameter.clamp_(-0.1, 0.1)


def scaled_by_rows(model: Joined, _: Any) -> None:
    with torch.no_grad():
        for block in model.blocks:
            rows = torch.arange(16, dtype=torch.float64)
            block.qkv.weight.mul_(rows[:, None] / 8)
            torch.add(block.qkv.bias, rows / 100, out=block.qkv.bias)


def views_written(model: Joined, _: Any) -> None:
    with torch.no_grad():
        weight = model.blocks[0].qkv.weight
        weight[0:4].zero_()
        weight[9:11, 2:4] = 0.25
        q, k, v = weight.split((8, 4, 4))
        k.mul_(2)
        v.add_(k)
        q.t()[1].fill_(0.5)
        first = model.blocks[1].up.bias[3:9]
        model.blocks[1].up.bias.mul_(0.5)
        first.add_(1)


def data_written(model: Joined, _: Any) -> None:
    model.blocks[0].up.weight.data[5:14] = 0.125
    model.blocks[0].up.bias.data[5:14].mul_(3)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def one_vector(model: Joined, _: Any) -> None:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.9, model.parameters())


def as_lists(model: Joined, _: Any) -> None:
    parameters = [x.detach() for x in model.parameters()]
    torch._foreach_mul_(parameters, 0.9)
    torch._foreach_lerp_(parameters, [x.flip(0) for x in parameters], 0.1)


def loaded(model: Joined, _: Any) -> None:
    torch.manual_seed(3)
    model.load_state_dict(Joined().double().state_dict())


def own_loaded(model: Joined, _: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def swapped(model: Joined, _: Any) -> None:
    one, other = (model.blocks[i].qkv.weight for i in (0, 1))
    with torch.no_grad():
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def states_scaled(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"][1:3] = 0.5


def states_replaced(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].flip(0)


def states_loaded(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


WRITES: tuple[Callable[[Any, Any], None], ...] = (
    *(clamped, scaled_by_rows, views_written, data_written, one_vector, as_lists, loaded),
    *(own_loaded, swapped, states_scaled, states_replaced, states_loaded),
)


@every_strategy
def test_the_next_step_sees_what_users_write(name: str) -> None:
    with shared(name) as both:
        both.step()
        for write in WRITES:
            both.both(write)
            assert_same_state(whole_state(both.model), both.plain.state_dict(), 1e-9)
            both.step()
            both.check()
        check_shares(both)


@every_strategy
def test_a_checkpoint_goes_back(name: str) -> None:
    with shared(name) as both:
        both.step()
        states = copy.deepcopy((both.plain.state_dict(), both.other.state_dict()))
        both.step(2)
        for model, optimizer in ((both.model, both.optimizer), (both.plain, both.other)):
            model.load_state_dict(states[0])
            optimizer.load_state_dict(copy.deepcopy(states[1]))
        both.step(2)
        both.check()


def test_averages_and_copies() -> None:
    with shared("tensor") as both:
        average, expected = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            for model in (both.model, both.plain)
        )
        for _ in range(3):
            both.step()
            average.update_parameters(both.model)
            expected.update_parameters(both.plain)
        assert_same_state(whole_state(average), expected.state_dict(), 1e-9)
        torch.testing.assert_close(whole(average(batch(5)["x"])), expected(batch(5)["x"]).detach())
        copied = copy.deepcopy(both.model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        both.step()
        both.check()


@every_strategy
def test_a_first_update_by_gradients_that_stay(name: str) -> None:
    with shared(name) as both:
        given = both.next_batch()
        loss_fn(both.plain, given).backward()
        both.program.step(given, update=False)
        both.program.update()
        both.other.step()
        both.check()


@every_strategy
def test_gradients_that_stay(name: str) -> None:
    def changed(model: nn.Module, _: Any) -> None:
        for parameter in joined(model):
            assert parameter.grad is not None
            parameter.grad[2:5].mul_(0.5)

    def held() -> None:
        given = both.next_batch()
        loss_fn(both.plain, given).backward()
        both.program.step(given, update=False)

    def same() -> None:
        for live, plain in zip(both.model.parameters(), both.plain.parameters(), strict=True):
            torch.testing.assert_close(whole(live.grad), plain.grad, rtol=1e-8, atol=1e-12)

    with shared(name) as both:
        both.step()
        held()
        same()
        both.both(changed)
        both.both(lambda model, _: loss_fn(model, batch(60)).backward())
        same()
        held()
        same()
        both.other.step()
        both.other.zero_grad()
        both.program.update()
        both.check()
        held()
        both.both(lambda model, _: clip_grad_norm_(model.parameters(), 0.05))
        both.both(lambda _, optimizer: optimizer.step())
        both.both(lambda _, optimizer: optimizer.zero_grad(set_to_none=False))
        both.step()
        both.check()


def another(both: Twins, grid: Any, strategy: weft.Strategy) -> weft.Program:
    placement = weft.placement("cpu", grid)
    arguments = {"placement": placement, "strategy": strategy}
    return weft.compile(both.model, loss_fn, both.optimizer, batch(0), **arguments)


@every_strategy
def test_two_programs_in_turns(name: str) -> None:
    grid, strategy = SHARED[name]
    with shared(name) as both:
        both.step()
        first, second = both.program, another(both, grid, replace(strategy, recompute=["*"]))
        for both.program in (first, second, second, first):
            both.step()
            both.check()
        first.close()
        both.program = second
        both.step()
        both.check()


def test_a_second_program_with_another_optimizer() -> None:
    """Its states are not those of the first one, but lie as their parameters do."""
    with shared("tensor") as both:
        both.step()
        first = both.program, both.optimizer, both.other
        both.optimizer, both.other = momentum(both.model), momentum(both.plain)
        both.program = another(both, *SHARED["tensor"])
        both.step(2)
        both.check()
        for parameter in joined(both.model):
            assert both.optimizer.state[parameter]["momentum_buffer"].shares == parameter.shares  # type: ignore[attr-defined]
        both.program.close()
        both.program, both.optimizer, both.other = first
        both.step()
        both.check()


class InOrder(nn.Module):
    """Reads a joined matrix whole."""

    def __init__(self, model: Joined) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(16, dtype=x.dtype, device=x.device)
        weight = self.model.blocks[0].qkv.weight
        found: Tensor = self.model(x) + (weight.cumsum(0) * rows[:, None]).sum()
        return found


def test_a_second_program_that_needs_the_order() -> None:
    def square(model: nn.Module, given: Any) -> Tensor:
        return (model(given["x"]) ** 2).mean()

    with shared("tensor") as both:
        both.step()
        models = InOrder(both.model), InOrder(both.plain)
        ours, theirs = (torch.optim.SGD(x.parameters(), lr=1e-4, momentum=0.9) for x in models)
        found = weft.compile(
            models[0],
            square,
            ours,
            batch(0),
            placement=weft.placement("cpu", PAIR),
            strategy=weft.tensor_parallel(
                [f"model.{each}" for each in COLUMNS], [f"model.{each}" for each in ROWS]
            ),
        )
        with closing(found) as program:
            for seed in (40, 41):
                theirs.zero_grad()
                expected = square(models[1], batch(seed))
                expected.backward()
                theirs.step()
                assert program.step(batch(seed)).item() == pytest.approx(expected.item(), rel=1e-9)
            assert_same_state(whole_state(models[0]), models[1].state_dict(), 1e-9)
            weight = models[0].model.blocks[0].qkv.weight
            torch.testing.assert_close(
                whole(ours.state[weight]["momentum_buffer"]),
                theirs.state[models[1].model.blocks[0].qkv.weight]["momentum_buffer"],
            )
        both.other.zero_grad()
        both.step()
        both.check()


@every_strategy
def test_other_shapes_of_the_batch(name: str) -> None:
    with shared(name) as both:
        both.step()
        for rows in (16, 8, 16):
            given = batch(70, rows)
            found = both.program.step(given).item()
            assert found == pytest.approx(
                live_models.eager_step(both.plain, both.other, given), rel=1e-9
            )
            both.other.zero_grad()
        both.check()


@pytest.mark.thorough
@pytest.mark.one_process("a job of processes has one number of ranks")
def test_a_model_is_laid_anew() -> None:
    with shared("tensor") as both:
        both.step()
    for name in (
        "data",
        "hybrid, zero 1",
        "one rank",
        "tensor",
        "stages",
        "data",
        "hybrid, zero 3",
    ):
        grid, strategy = SHARED.get(name) or STRATEGIES[name]
        with weft.local_world(torch.tensor(grid).numel()):
            both.program = another(both, grid, strategy)
            if name in SHARED:
                check_shares(both)
            both.step()
            both.eager_step()
            both.step()
            both.check()
            both.program.close()


@every_strategy
def test_a_model_is_given_back(name: str) -> None:
    with shared(name) as both:
        both.step(2)
        both.program.close()
        weft.release(both.model, both.optimizer)
        assert all(type(parameter) is nn.Parameter for parameter in both.model.parameters())
    both.eager_step()
    both.check()
    assert not any(hasattr(parameter, "shares") for parameter in both.model.parameters())


@pytest.mark.one_process("a process shows its own part only")
def test_what_users_read_is_in_order_or_refused() -> None:
    with shared("tensor") as both:
        live, plain = both.model.blocks[0].up.bias, both.plain.blocks[0].up.bias
        assert live.tolist() == plain.tolist()
        assert live[5].item() == plain[5].item()
        text = str(plain.detach()).partition("]")[0].removeprefix("tensor")
        assert repr(live).startswith(f"weft.tensor{text}]")
        assert "stored in shares 0 [12, 12] 2" in repr(live)
        torch.testing.assert_close(whole(live.to_global(sbp=weft.broadcast)), plain.detach())
        there = live.to_global(sbp=live.sbp)
        assert there.shares is None
        torch.testing.assert_close(torch.cat(list(there.shards().values())), plain.detach())
        for read in (live.shards, live.to_local):
            with pytest.raises(UserError, match="is stored in shares 0"):
                read()
        with pytest.raises(UserError, match="stored in shares and keeps its shape"):
            live.detach().unsqueeze_(0)
        assert live.detach().shares == live.shares
        assert (live * 2).shares is None
        assert copy.deepcopy(live).shares == live.shares
        live.full().sum().backward()
        (live * torch.arange(24.0).double()).sum().backward()
        torch.testing.assert_close(whole(live.grad), 1 + torch.arange(24.0).double())
        live.grad = None


def test_numbers_that_are_drawn_into_them() -> None:
    with shared("tensor") as both:
        weft.manual_seed(5)
        expected = weft.tensor(
            torch.zeros(16, 8).double(), placement=weft.placement("cpu", PAIR), sbp=weft.split(0)
        )
        expected.normal_()
        weft.manual_seed(5)
        with torch.no_grad():
            both.model.blocks[0].qkv.weight.normal_()
        torch.testing.assert_close(whole(both.model.blocks[0].qkv.weight), whole(expected))
        weft.manual_seed(None)


def test_masters_follow_what_users_write() -> None:
    torch.manual_seed(0)
    model = Joined().bfloat16()
    optimizer = momentum(model)

    def cast(model: nn.Module, given: Any) -> Tensor:
        return F.cross_entropy(model(given["x"].bfloat16()).float(), given["y"])

    results = []
    for grid, strategy in (([0], DATA), (PAIR, TENSOR)):
        live, own = copy.deepcopy((model, optimizer))
        with weft.local_world(torch.tensor(grid).numel()):
            program = weft.compile(
                live,
                cast,
                own,
                batch(0),
                placement=weft.placement("cpu", grid),
                strategy=replace(strategy, precision=weft.Precision(masters=True)),
            )
            program.step(batch(1))
            with torch.no_grad():
                for block in live.blocks:
                    block.qkv.weight.copy_(torch.arange(128).view(16, 8) / 256)
            program.step(batch(2))
            results.append(program.full_state_dict(masters=True))
            program.close()
    assert_same_state(results[1], results[0], 2e-2)
