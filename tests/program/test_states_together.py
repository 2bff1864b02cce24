"""The states that a first step makes move to one place, and training goes on with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.program.training import training
from weft.runtime.memory.heap import defragment, keep_freed_memory

WIDTH = 512


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's, with a state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].setdefault("last", torch.zeros_like(p))
                    last.copy_(p.grad.sign())
                    p.sub_(last, alpha=0.01)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()


def batch(seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Tensor], int, int]]:
    """Of each call that moves tensors: these, the room, and the bytes that it has moved."""
    calls: list[tuple[list[Tensor], int, int]] = []
    move = defragment

    def moved(tensors: Any, room: int) -> int:
        every = list(tensors)
        calls.append((every, room, move(every, room)))
        return calls[-1][2]

    monkeypatch.setattr(training, "defragment", moved)
    return calls


def program_of(own: nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> weft.Program:
    placement = weft.placement("cpu", range(ranks))
    return weft.compile(own, loss_fn, optimizer, batch(), placement=placement)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_states_of_a_first_step_move(ranks: int, moves: list[Any]) -> None:
    own, expected = model(), model()
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2, eps=1e-4)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2, eps=1e-4)
    with weft.local_world(ranks):
        program = program_of(own, optimizer, ranks)
        for seed in range(3):
            plain.zero_grad()
            loss = loss_fn(expected, batch(seed))
            loss.backward()
            plain.step()
            assert program.step(batch(seed)).item() == pytest.approx(loss.item(), rel=1e-4)
            assert len(moves) == 1
        (tensors, room, moved) = moves[0]
        kept = [x.kept.entries for x in program._core.setting.variables.values()]
        states = [each for rank in kept for entries in rank.values() for each in entries.values()]
        assert {id(each) for each in tensors} == {id(each) for each in states}
        measured = [peak.measured for peak in program.memory()]
        assert room == sum(m.activations + m.gradients + m.communication for m in measured if m)
        large = sum(each.nbytes for each in states if each.nbytes >= 4096)
        assert moved == (large if keep_freed_memory() else 0)
        program.close()


def test_states_of_steps_that_add_move_after_the_update(moves: list[Any]) -> None:
    own = model()
    with weft.local_world(1):
        program = program_of(own, torch.optim.AdamW(own.parameters()), 1)
        program.step(batch(), update=False)
        assert not moves
        program.update()
        assert [room > 0 for _, room, _ in moves] == [True]
        program.close()


def test_states_that_the_user_brought_and_those_of_foreign_optimizers_stay(
    moves: list[Any],
) -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    brought = copy.deepcopy(optimizer.state_dict())
    brought["state"] = {
        number: {"momentum_buffer": torch.zeros_like(p)}
        for number, p in enumerate(own.parameters())
    }
    optimizer.load_state_dict(brought)
    with weft.local_world(1):
        program = program_of(own, optimizer, 1)
        program.step(batch())
        program.close()
        weft.release(own)
        foreign = program_of(own, Sign(own.parameters()), 1)
        foreign.step(batch())
        foreign.close()
    assert not moves
