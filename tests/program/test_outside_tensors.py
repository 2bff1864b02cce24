"""Tensors outside the model that get other memory, other forms or other owners between steps, as plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from program.live_models import eager_step
from single_device import whole
from weft.errors import UserError

PAIR = weft.placement("cpu", [0, 1])
Change = Callable[[Any, int], object]


class Listed(nn.Module):
    """Runs what is in containers of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for scale in self.scales:
            x = x * scale
        return x


class Named(nn.Module):
    """Runs layers in the order in which they stand in a dict of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x[:, :3]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def tensors(held: Any) -> list[torch.Tensor]:
    return list(held.parameters()) if isinstance(held, nn.Module) else [held]


def given_data(held: Any, step: int) -> None:
    for each in tensors(held):
        each.data = each.data * 0.5 + step


def set_elsewhere(held: Any, step: int) -> None:
    for each in tensors(held):
        each.set_(each.detach() * 0.5 + step)  # type: ignore[call-overload]


def there_and_back(held: Any, step: int) -> None:
    held.double()
    for each in held.parameters():
        each.mul_(0.5)
    held.float()


def assigned(held: Any, step: int) -> None:
    state = {name: value * 0.5 + step for name, value in held.state_dict().items()}
    held.load_state_dict(state, assign=True)


def another_layer(held: Any, step: int) -> None:
    torch.manual_seed(step)
    held[0] = frozen(nn.Linear(4, 5))


def in_a_list(held: Any, step: int) -> None:
    torch.manual_seed(step)
    held.layers[0] = frozen(nn.Linear(4, 4))
    held.scales[0] = nn.Parameter(torch.rand(3), requires_grad=False)


def appended(held: Any, step: int) -> None:
    torch.manual_seed(step)
    held.layers.append(frozen(nn.Linear(3, 3)))


def reordered(held: Any, step: int = 2) -> None:
    if step == 2:
        held.layers["a"] = held.layers.pop("a")


def transposed(held: Any, step: int) -> None:
    held.t_()


def grown(held: Any, step: int) -> None:
    held.data = torch.full((3, 3 + step), 0.5)


def teacher(held: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), held(x))


def scaled(held: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) @ held).square().mean()


CASES: list[tuple[Callable[[], Any], Any, Change]] = [
    (lambda: frozen(net()), teacher, given_data),
    (lambda: frozen(net()), teacher, set_elsewhere),
    (lambda: frozen(net()), teacher, there_and_back),
    (lambda: frozen(net()), teacher, assigned),
    (lambda: frozen(net()), teacher, another_layer),
    (lambda: frozen(Listed()), teacher, in_a_list),
    (lambda: frozen(Listed()), teacher, appended),
    (lambda: frozen(Named()), teacher, reordered),
    (lambda: torch.arange(9.0).reshape(3, 3), scaled, given_data),
    (lambda: torch.arange(9.0).reshape(3, 3), scaled, transposed),
    (lambda: torch.arange(9.0).reshape(3, 3), scaled, grown),
]


@pytest.mark.parametrize(("make", "use", "change"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_they_are_read_as_they_are(make: Callable[[], Any], use: Any, change: Change) -> None:
    torch.manual_seed(0)
    model, place = net(), SimpleNamespace(held=make())
    other, plain = SimpleNamespace(held=copy.deepcopy(place.held)), copy.deepcopy(model)
    x = torch.randn(4, 4)
    with weft.local_world(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy = weft.data_parallel()
        program = weft.compile(
            model,
            lambda model, x: use(place.held, model, x),
            optimizer,
            x,
            placement=PAIR,
            strategy=strategy,
        )
        again = torch.optim.SGD(plain.parameters(), 0.1)
        for step in range(4):
            if step:
                with torch.no_grad():
                    change(place.held, step)
                    change(other.held, step)
            found = program.step(x).item()
            expected = eager_step(plain, again, x, lambda m, x: use(other.held, m, x))
            assert found == pytest.approx(expected, rel=1e-5)
        program.verify(x)
        program.close()


def test_another_order_or_exchange_of_the_models_own_parts_is_refused() -> None:
    model, x = Named(), torch.randn(4, 4)
    with weft.local_world(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        program = weft.compile(model, lambda m, x: m(x).sum(), optimizer, x, placement=PAIR)
        program.step(x)
        model.layers["c"] = nn.Linear(4, 4)  # what has come is no part of the step
        model.layers.pop("c")
        program.step(x)
        one, two = model.layers["a"].bias, model.layers["b"].bias
        torch.utils.swap_tensors(one, two)
        with pytest.raises(UserError, match="swap_tensors"):
            program.step(x)
        torch.utils.swap_tensors(one, two)
        plain = nn.Parameter(torch.zeros(4))
        torch.utils.swap_tensors(one, plain)
        with pytest.raises(UserError, match="swap_tensors"):
            program.step(x)
        torch.utils.swap_tensors(one, plain)
        reordered(model)
        with pytest.raises(UserError, match=r"layers\.a was put into another place"):
            program.step(x)
        program.close()


def test_one_that_was_given_the_data_of_a_live_one_is_refused() -> None:
    """Torch takes the live one's shell there, which has no values."""
    model, held, x = net(), torch.ones(3), torch.randn(4, 4)
    with weft.local_world(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        program = weft.compile(
            model, lambda m, x: (m(x) * held).sum(), optimizer, x, placement=PAIR
        )
        program.step(x)
        held.data = model[2].bias.data
        with pytest.raises(UserError, match="holds no values any more"):
            program.step(x)
        held.data = torch.ones(3)
        program.step(x)
        program.close()


@pytest.mark.parametrize("zero", [1, 3])
def test_what_was_kept_of_a_live_tensor_before_its_data_is_replaced_stays(zero: int) -> None:
    """Averages that are put in for an evaluation and taken out again, and what `detach()` and `state_dict()` gave."""
    torch.manual_seed(0)
    model = net()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 4)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    def averaged(model: nn.Module, by: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Put other values in, and give what the model says then; put the former ones back."""
        kept = {name: p.data for name, p in model.named_parameters()}
        views = [p.detach().t() for p in model.parameters() if p.dim() == 2]
        state = model.state_dict()
        momentum = [entries["exp_avg"].data for entries in by.state.values()]
        for p in model.parameters():
            p.data = p.data * 0.5
        for entries in by.state.values():
            entries["exp_avg"].data = entries["exp_avg"] * 0
        with torch.no_grad():
            found = [whole(model(x)), *map(whole, views), *map(whole, state.values())]
        for name, p in model.named_parameters():
            p.data = kept[name]
        for entries, value in zip(by.state.values(), momentum, strict=True):
            entries["exp_avg"].data = value
        return found

    with weft.local_world(2):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        strategy = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(zero))
        program = weft.compile(model, loss_fn, optimizer, x, placement=PAIR, strategy=strategy)
        other = torch.optim.AdamW(plain.parameters(), 0.01)
        for _ in range(3):
            expected = eager_step(plain, other, x, loss_fn)  # type: ignore[arg-type]
            assert program.step(x).item() == pytest.approx(expected, rel=1e-5)
            pairs = zip(averaged(model, optimizer), averaged(plain, other), strict=True)
            for found, value in pairs:
                torch.testing.assert_close(found, value.detach())
        program.close()


def test_data_of_an_optimizers_state_is_written() -> None:
    torch.manual_seed(0)
    model = net()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 4)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    with weft.local_world(2):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        strategy = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))
        program = weft.compile(model, loss_fn, optimizer, x, placement=PAIR, strategy=strategy)
        other = torch.optim.AdamW(plain.parameters(), 0.01)
        for _ in range(3):
            program.step(x)
            eager_step(plain, other, x, loss_fn)
            for each in (optimizer, other):
                for state in each.state.values():
                    state["exp_avg"].data = state["exp_avg"].data * 0.5
                    state["step"].data = state["step"].data + 3
        for live, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(live), expected.detach())
        program.close()


def test_a_write_to_elements_that_share_memory_changes_nothing() -> None:
    model = net()
    with weft.local_world(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy = weft.Strategy(parameters={"0.weight": weft.split(1)})
        x = torch.randn(4, 4)
        program = weft.compile(
            model, lambda m, x: m(x).sum(), optimizer, x, placement=PAIR, strategy=strategy
        )
        before = whole(model[0].weight).clone()
        with torch.no_grad(), pytest.raises(RuntimeError, match="more than one element"):
            model[0].weight[:1].expand(5, 4).add_(1)
        assert torch.equal(whole(model[0].weight), before)
        assert whole(model[0].weight.detach().flatten().quantile(0.3)).isfinite()
        program.close()
