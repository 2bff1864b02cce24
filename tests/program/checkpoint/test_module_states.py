"""What modules give by `get_extra_state()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import UserError


class Counting(nn.Module):
    """Keeps something beside its tensors."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        if state == "bad":
            raise ValueError("no such state")
        self.kept = state


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def program_of(model: nn.Module) -> weft.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss_fn, optimizer, torch.ones(4, 3), placement=place)


def test_it_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(Counting({"calls": 3}), nn.Linear(2, 3), Counting(torch.arange(4)))
    with weft.local_world(2):
        program = program_of(model)
        program.step(torch.ones(4, 3))
        program.save(tmp_path / "run", {"mine": 1})
        program.close()
        other = nn.Sequential(Counting(None), nn.Linear(2, 3), Counting(None))
        program = program_of(other)
        assert set(program.full_state_dict()) == {n for n, _ in model.named_parameters()}
        found = program.load(tmp_path / "run")
        program.close()
    assert found == {"mine": 1}
    assert other[0].kept == {"calls": 3}
    assert torch.equal(other[2].kept, torch.arange(4))


def test_what_no_checkpoint_takes_is_told(tmp_path: Path) -> None:
    with weft.local_world(2):
        program = program_of(Counting(object()))
        with pytest.raises(UserError, match=r"weft\.modules\..* is a object"):
            program.save(tmp_path / "saved")
        program.close()
        program = program_of(Counting("bad"))
        program.save(tmp_path / "saved")
        with pytest.raises(UserError, match=r"set_extra_state\(\) of the model, .*no such state"):
            program.load(tmp_path / "saved")
        program.close()


def test_a_hook_that_makes_tensors_is_told(tmp_path: Path) -> None:
    def hook(_module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
        state[f"{prefix}0.weight"] = state[f"{prefix}0.weight"].clone()

    model = nn.Sequential(nn.Linear(3, 2))
    model.register_state_dict_post_hook(hook)
    with weft.local_world(2):
        program = program_of(model)
        with pytest.raises(UserError, match="0.weight, a tensor of shape .* neither"):
            program.save(tmp_path / "saved")
        program.close()
