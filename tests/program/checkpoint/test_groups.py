"""Options of parameter groups, and whose they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from program.checkpoint.nets import assert_same, everything
from weft.errors import UserError

BATCH = torch.ones(4, 6)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@contextmanager
def compiled(make: Callable[[Any], torch.optim.Optimizer]) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))
    optimizer = make(model)
    with weft.local_world(2):
        program = weft.compile(
            model, loss_fn, optimizer, BATCH, placement=weft.placement("cpu", [0, 1])
        )
        yield program, optimizer
        program.close()


def grouped(*order: str, kind: Any = torch.optim.AdamW) -> Callable[[Any], torch.optim.Optimizer]:
    """Groups of the weights or the biases of a model."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        every = model.named_parameters()
        named: Any = {each: [] for each in order}
        for name, parameter in every:
            named[name.partition(".")[2]].append(parameter)
        decay = {"weight": 0.5, "bias": 0.0}
        found = [{"params": named[each], "weight_decay": decay[each]} for each in order]
        return kind(found, lr=0.1)  # type: ignore[no-any-return]

    return make


def test_numbers_in_tensors_and_of_numpy_come_back(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        betas = torch.tensor(0.8), torch.tensor([0.9])
        found = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), betas=betas)  # type: ignore[arg-type]
        found.param_groups[0] |= {"at": np.int64(3), "kept": [np.float32(0.5), np.True_]}
        return found

    with compiled(make) as (program, _):
        program.step(BATCH)
        program.save(tmp_path / "saved")
        program.step(BATCH)
        whole = everything(program)
    with compiled(make) as (program, optimizer):
        (group,) = optimizer.param_groups
        group["betas"][0].fill_(0.1)
        mine = group["betas"]
        program.load(tmp_path / "saved")
        assert group["betas"][0] is mine[0]
        assert [float(each) for each in group["betas"]] == pytest.approx([0.8, 0.9])
        assert (group["at"], group["kept"]) == (3, [0.5, True])
        program.step(BATCH)
        found = everything(program)
        found.pop("groups")
        assert_same(found, {name: x for name, x in whole.items() if name != "groups"})


def test_an_option_that_has_no_place_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with compiled(grouped("weight", "bias")) as (program, optimizer):
        optimizer.param_groups[1]["mine"] = {"scales": (torch.ones(2),)}
        with pytest.raises(UserError, match=r"option 'mine' of parameter group 1 .* \[2\]"):
            program.save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (grouped("weight", "bias", kind=torch.optim.Adam), "optimizer AdamW, .* has Adam"),
        (grouped("weight", "bias", kind=torch.optim.SGD), "optimizer AdamW, .* has SGD"),
        (grouped("bias", "weight"), r"group 0 of AdamW .*: 0.bias is in that of the program"),
    ],
)
def test_options_of_other_groups_are_refused(make: Any, why: str, tmp_path: Path) -> None:
    with compiled(grouped("weight", "bias")) as (program, _):
        program.step(BATCH)
        program.save(tmp_path / "saved")
    with compiled(make) as (program, _):
        before = everything(program)
        with pytest.raises(UserError, match=why):
            program.load(tmp_path / "saved")
        assert_same(everything(program), before)
        program.load(tmp_path / "saved", model_only=True)


def test_the_checkpoint_of_another_program_of_the_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(6, 6), "two": nn.Linear(6, 1)})

    def both(model: Any, batch: Tensor) -> Tensor:
        return model["two"](model["one"](batch)).square().mean()  # type: ignore[no-any-return]

    with weft.local_world(2):
        place = weft.placement("cpu", [0, 1])
        programs = [
            weft.compile(model, both, torch.optim.Adam(part.parameters()), BATCH, placement=place)
            for part in model.values()
        ]
        for number, program in enumerate(programs):
            program.step(BATCH)
            program.save(tmp_path / f"{number}")
        with pytest.raises(UserError, match="one.bias is in that of the program"):
            programs[0].load(tmp_path / "1")
        programs[0].load(tmp_path / "0")
        kept = weft.Checkpoints(tmp_path / "run", every=1)
        kept.save(programs[0])
        saved = sorted(path.name for path in kept.all()[0].iterdir())
        for save in (kept.save, kept.save_when_due):
            with pytest.raises(UserError, match="another open program saves to"):
                save(programs[1])
        assert sorted(path.name for path in kept.all()[0].iterdir()) == saved
        programs[0].close()
        kept.save(programs[1])
        programs[1].close()
