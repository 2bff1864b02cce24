"""Optimizers that put other tensors, or numbers, in the place of their states: seen everywhere as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import VerificationError
from weft.runtime.memory.state import Variables

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()
DATA = weft.Strategy(batch={"*": weft.split(0)})
LAYOUTS = {
    "one rank": ([0], weft.Strategy()),
    "data": ([0, 1], DATA),
    "zero 3": ([0, 1], weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))),
    "tensor": ([0, 1], weft.tensor_parallel(["0"], ["2"])),
    "pipeline": ([[0], [1]], weft.Strategy(stages=2, micro_batches=2)),
}


def heavy_ball(state: dict[str, Any], p: Any, lr: float) -> None:
    state["m"] = 0.9 * state["m"] + p.grad if "m" in state else p.grad.clone()
    p.add_(state["m"], alpha=-lr)


def norm_after_a_number(state: dict[str, Any], p: Any, lr: float) -> None:
    p.add_(p.grad / (1 + state.get("rms", 0)), alpha=-lr)
    state["rms"] = p.norm() if "rms" in state else 0.5


def own_gradient_and_value(state: dict[str, Any], p: Any, lr: float) -> None:
    if not state:
        state["gradient"], state["old"] = torch.zeros_like(p), p.detach()
    p.add_(p.grad + 0.5 * state["gradient"] + 0.1 * (p - state["old"]), alpha=-lr)
    state["gradient"], state["old"] = p.grad, p.detach().clone()


def exchanged(state: dict[str, Any], p: Any, lr: float) -> None:
    if not state:
        state["a"], state["b"] = torch.zeros_like(p), torch.ones_like(p)
    state["a"], state["b"] = state["b"], state["a"] * 0.5 + p.grad
    p.add_(state["a"], alpha=-lr)


def data_of_the_parameter(state: dict[str, Any], p: Any, lr: float) -> None:
    state["before"] = state.get("last", p.grad)
    state["last"] = p.grad.clone()
    p.data = p.data - lr * (p.grad + 0.5 * state["before"])


def late_and_gone(state: dict[str, Any], p: Any, lr: float) -> None:
    state["count"] = state.get("count", 0) + 1
    state["odd"] = state["count"] % 2 == 1
    if "first" in state:
        state["m"] = state.pop("first") * 0.5
    elif "m" not in state:
        state["first"] = p.grad.clone()
    p.add_(state.get("m", p.grad), alpha=-lr / state["count"])


UPDATES = [
    heavy_ball,
    norm_after_a_number,
    own_gradient_and_value,
    exchanged,
    late_and_gone,
    data_of_the_parameter,
]


class Own(torch.optim.Optimizer):
    """An optimizer of the user's."""

    def __init__(self, parameters: Any, update: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.by = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.by(self.state[p], p, group["lr"])


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model(x).square().mean()
    return made


def made(update: Callable[..., None]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, Own(model.parameters(), update)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor = X) -> None:
    optimizer.zero_grad()
    loss(model, x).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class Pair:
    """A model that weft trains, and one that plain PyTorch trains beside it."""

    def __init__(self, layout: str, update: Callable[..., None]) -> None:
        self.ranks, self.strategy = LAYOUTS[layout]
        self.update, self.plain = update, made(update)
        self.model, self.optimizer = made(update)
        self.program: Any = None

    def compile(self) -> None:
        if self.program is not None:
            self.program.close()
        place = weft.placement("cpu", self.ranks)
        given = self.model, loss, self.optimizer, X
        self.program = weft.compile(*given, placement=place, strategy=self.strategy)

    def step(self, x: torch.Tensor = X) -> None:
        self.program.step(x)
        plain(*self.plain, x)

    def now(self, way: str) -> tuple[str, Any, Any]:
        ref, beside = self.plain
        found = self.model.state_dict(), self.optimizer.state_dict()["state"]
        if self.program is not None:
            states = self.program.full_optimizer_state_dict()["state"]
            found = self.program.full_state_dict(), states
        return way, found, (ref.state_dict(), beside.state_dict()["state"])


def ways(pair: Pair, folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """Each way on from some steps, with model and states of weft, and of plain PyTorch after as many steps."""
    pair.compile()
    for x in (X, X[:4], X):
        pair.step(x)
    yield pair.now("steps")
    pair.program.verify(X)
    pair.step()
    yield pair.now("verify")
    for update in (pair.program.update, pair.optimizer.step):
        pair.program.step(X, update=False)
        update()
        plain(*pair.plain)
        pair.step()
        yield pair.now("update() or the user's step")
    pair.program.save(folder)
    pair.program.close()
    pair.model, pair.optimizer = made(pair.update)
    pair.compile()
    pair.program.load(folder)
    pair.step()
    yield pair.now("save and load")
    pair.compile()
    pair.step()
    yield pair.now("compile again")
    pair.program.close()
    pair.program = None
    weft.release(pair.model, pair.optimizer)
    plain(pair.model, pair.optimizer)
    plain(*pair.plain)
    yield pair.now("release")


@pytest.mark.parametrize("update", UPDATES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_are_those_of_plain_pytorch(
    layout: str, update: Callable[..., None], tmp_path: Path
) -> None:
    if layout == "tensor" and update is norm_after_a_number:
        pytest.skip("a norm needs the whole parameter, which tensor parallelism splits")
    with weft.local_world(torch.tensor(LAYOUTS[layout][0]).numel()):
        for way, found, expected in ways(Pair(layout, update), tmp_path / "saved"):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-9, atol=1e-12, msg=lambda x, way=way: f"{way}: {x}"
                )


def test_a_check_sees_states_that_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none before the first step, so that only a second one goes by them."""
    known = lambda self, parameter, _: parameter in self.kept.entries  # noqa: E731
    monkeypatch.setattr(Variables, "keeps", known)
    model, optimizer = made(heavy_ball)
    place = weft.placement("cpu", [0, 1])
    with weft.local_world(2), pytest.raises(VerificationError, match="in a second step.*state"):
        weft.compile(model, loss, optimizer, X, placement=place, strategy=DATA, verify=True)
