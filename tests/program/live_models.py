"""A live model with its program, beside a plain copy that is trained alike: for the tests of what is live."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from models import token_batch
from single_device import adamw, assert_same_state, whole, whole_state

S = weft.split
PAIR, GRID = [0, 1], [[0, 1], [2, 3]]
DATA = weft.data_parallel()
STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "one rank": ([0], DATA),
    "data": (PAIR, DATA),
    "zero 3": (PAIR, weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3))),
    "tensor": (PAIR, weft.tensor_parallel(["first"], ["last"])),
    "pipeline": (PAIR, weft.Strategy(batch={"*": S(0)}, stages=2)),
    "pipeline beside data": (
        GRID,
        weft.Strategy(batch={"*": S(0)}, stages=2, zero=weft.Zero(1)),
    ),
}
Batch = dict[str, torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two linear layers around a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return found


def batch(seed: int, rows: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.randint(4, (rows,), generator=generator)}


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Twins:
    """A live model and optimizer with a program, and plain copies of them.

    Args:
        model: plain; it becomes live.
        optimizer: of the model.
        compile: makes the program of the model and the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compile: Callable[[nn.Module, torch.optim.Optimizer], weft.Program],
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.plain, self.other = copy.deepcopy((model, optimizer))
        self.compile = compile
        self.program = compile(model, optimizer)
        self._seed = 0

    def next_batch(self) -> Batch:
        self._seed += 1
        return batch(self._seed)

    def step(self, count: int = 1) -> None:
        """Steps of the program, and the same on the plain copy; their losses agree."""
        for _ in range(count):
            given = self.next_batch()
            found = self.program.step(given).item()
            assert found == pytest.approx(eager_step(self.plain, self.other, given), rel=1e-9)

    def eager_step(self) -> None:
        """A step of PyTorch on both."""
        given = self.next_batch()
        found = eager_step(self.model, self.optimizer, given)
        assert found == pytest.approx(eager_step(self.plain, self.other, given), rel=1e-9)

    def both(self, act: Callable[[Any, torch.optim.Optimizer], Any]) -> None:
        """The same act on the live model and optimizer, and on the plain ones."""
        act(self.model, self.optimizer)
        act(self.plain, self.other)

    def check(self) -> None:
        """Parameters, buffers and states agree."""
        if self.program._core.is_open:  # processes learn what only others have counted
            self.program.full_optimizer_state_dict()
        assert_same_state(whole_state(self.model), self.plain.state_dict(), 1e-9)
        twins = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        for live, plain in twins:
            state, expected = self.optimizer.state[live], self.other.state[plain]
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    whole(torch.as_tensor(state[name])), torch.as_tensor(value)
                )


def generated(model: nn.Module) -> list[list[int]]:
    """Tokens that a language model says, one after another, each on those before."""
    tokens = token_batch(2, seed=5)["x"][:, :3]
    with torch.no_grad():
        for _ in range(4):
            best = whole(model.eval()(tokens))[:, -1].argmax(-1)
            tokens = torch.cat([tokens, best[:, None]], 1)
    model.train()
    found: list[list[int]] = tokens.tolist()
    return found


def norms(states: dict[int, dict[str, torch.Tensor]]) -> list[list[float]]:
    """Of every state of an optimizer, in the order of its parameters."""
    return [[x.double().norm().item() for x in states[i].values()] for i in sorted(states)]


def eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Batch, loss_fn: Any = loss_fn
) -> float:
    """A step of plain PyTorch, which leaves no gradients."""
    loss = loss_fn(model, given)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return whole(loss).item()


@contextmanager
def twins(
    name: str,
    make_model: Callable[[], nn.Module] = Net,
    make_optimizer: MakeOptimizer = adamw,
    **options: Any,
) -> Iterator[Twins]:
    """Twins in a local world, under a strategy by its name."""
    grid, strategy = STRATEGIES[name]
    torch.manual_seed(0)
    model = make_model().double()

    def compile(model: nn.Module, optimizer: torch.optim.Optimizer) -> weft.Program:
        placement = weft.placement("cpu", grid)
        arguments = {"placement": placement, "strategy": strategy, **options}
        return weft.compile(model, loss_fn, optimizer, batch(0), **arguments)

    with weft.local_world(torch.tensor(grid).numel()):
        found = Twins(model, make_optimizer(model), compile)
        yield found
        found.program.close()
