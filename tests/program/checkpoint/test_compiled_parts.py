"""Models of which parts are in `torch.compile`: names are those of the model without it, of either form where given."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft

RANKS = 2
X = torch.arange(32.0).reshape(8, 4) / 32


def made(compiles: bool) -> nn.Module:
    torch.manual_seed(0 if compiles else 1)
    inner: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4))
    part = torch.compile(inner) if compiles else inner
    head = nn.Sequential(OrderedDict(once=nn.Linear(4, 4)))
    head.add_module("again", torch.compile(head.once) if compiles else head.once)
    return nn.Sequential(OrderedDict(inner=part, same=part, head=head))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def program(model: nn.Module) -> weft.Program:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ranks = weft.placement("cpu", list(range(RANKS)))
    strategy = weft.Strategy(parameters={"inner._orig_mod.0.weight": weft.split(0)})
    return weft.compile(model, squares, optimizer, X, placement=ranks, strategy=strategy)


@pytest.mark.one_process("each process would write the files of all")
def test_they_are_saved_and_loaded_by_the_names_of_the_plain_model(tmp_path: Path) -> None:
    saved, before = tmp_path / "saved", tmp_path / "before"
    with weft.local_world(RANKS):
        model = made(True)
        names = {name.replace("_orig_mod.", ""): name for name in model.state_dict()}
        assert names["inner.0.weight"] == "inner._orig_mod.0.weight"
        first = program(model)
        first.step(X)
        state = first.full_state_dict()
        assert state.keys() == names.keys() == model.state_dict().keys()
        first.save(saved)
        first.load_full_state_dict({names[name]: value for name, value in state.items()})
    text = (saved / "weft.json").read_text()
    assert "_orig_mod" not in text
    _with_old_names(saved, before)
    for folder in (saved, before):
        with weft.local_world(RANKS):
            second = program(made(False))
            second.load(folder)
            for name, value in second.full_state_dict().items():
                torch.testing.assert_close(value, state[name], rtol=0, atol=0)
            states = second.full_optimizer_state_dict()["state"]
            assert all(each["exp_avg_sq"].any() for each in states.values())


def _with_old_names(saved: Path, before: Path) -> None:
    """The same checkpoint as weft wrote it before, by the names of the model in `torch.compile`."""
    shutil.copytree(saved, before)
    content = json.loads((saved / "weft.json").read_text())
    del content["checksum"]
    old = json.loads(json.dumps(content).replace("inner.", "inner._orig_mod."))
    for name, each in old["tensors"].items():
        each["extents"] = content["tensors"][name.replace("_orig_mod.", "")]["extents"]
    (before / "weft.json").write_text(json.dumps(old))
