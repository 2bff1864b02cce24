"""Global tensors among the extras, as those of an average of the weights: saved and loaded in parts, in any layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft
from program.checkpoint.nets import Case, batch_of, compiled
from weft.errors import UserError
from weft.program.checkpoint.manifest import read_manifest

SHARDED, WHOLE = Case((2,), {"zero": weft.Zero(3)}), Case((3,))
NAMES = ("first.weight", "last.bias", "embedding.weight")
ROWS = {"first.weight": (weft.broadcast, weft.split(0)), "*": (weft.broadcast, weft.broadcast)}


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def values(average: AveragedModel) -> dict[str, torch.Tensor]:
    found = average.state_dict()
    return {
        n: x.full() if isinstance(x, weft.GlobalTensor) else x.clone() for n, x in found.items()
    }


def sbp_of(average: AveragedModel, name: str) -> object:
    tensor = average.module.get_parameter(name)
    assert isinstance(tensor, weft.GlobalTensor)
    return tensor.sbp


def trained(program: weft.Program, average: AveragedModel) -> None:
    for _ in range(2):
        program.step(batch_of(program.steps))
        average.update_parameters(program._core.setting.model)


@pytest.mark.parametrize("after", [WHOLE, Case((2, 2), {"parameters": ROWS})])
def test_an_average_goes_on_in_another_layout(after: Case, tmp_path: Path) -> None:
    """With the same average, and the same one after further steps; no rank has written the whole of a split tensor."""
    with compiled(SHARDED) as (program, _):
        average = averaged(program._core.setting.model)
        trained(program, average)
        program.save(tmp_path / "saved", {"average": average, "steps": program.steps})
        saved = values(average)
        trained(program, average)
        expected = values(average)
    name = "extra.laid.average.module.first.weight"
    assert len(read_manifest(tmp_path / "saved").tensors[name].extents) == 2
    with compiled(Case(after.grid, after.entries, seed=9)) as (program, _):
        average = averaged(program._core.setting.model)
        layouts = [sbp_of(average, name) for name in NAMES]
        found = program.load(tmp_path / "saved", {"average": average})
        assert found["steps"] == 2
        assert found["average"]["module.first.weight"].sbp == sbp_of(average, "first.weight")
        torch.testing.assert_close(values(average), saved, rtol=0, atol=0)
        assert layouts == [sbp_of(average, name) for name in NAMES]
        trained(program, average)
        torch.testing.assert_close(values(average), expected)


def test_without_an_object_that_has_it_it_is_whole(tmp_path: Path) -> None:
    with compiled(SHARDED) as (program, _):
        average = averaged(program._core.setting.model)
        trained(program, average)
        program.save(tmp_path / "saved", {"average": average})
        saved = values(average)
        found = program.load(tmp_path / "saved")["average"]
    torch.testing.assert_close(dict(found), saved, rtol=0, atol=0)


def test_names_with_dots_stay_apart(tmp_path: Path) -> None:
    with compiled(SHARDED) as (program, _):
        place = program.placement
        ones, twos = (
            weft.tensor(torch.full((4,), x), placement=place, sbp=weft.split(0)) for x in (1.0, 2.0)
        )
        program.save(tmp_path / "saved", {"a.b": ones, "a": {"b": twos}})
        found = program.load(tmp_path / "saved")
    assert found["a.b"].tolist() == [1.0] * 4
    assert found["a"]["b"].tolist() == [2.0] * 4


SCRIPT = """
import os, sys, torch, weft
from torch import nn
model = nn.Linear(4, 4)
place = weft.placement("cpu", [0, 1])
loss = lambda model, batch: model(batch["x"]).sum()
program = weft.compile(model, loss, torch.optim.SGD(model.parameters()), {"x": torch.ones(2, 4)}, placement=place)
mine = weft.zeros(4, placement=place, sbp=weft.split(0)) if os.environ["RANK"] == "0" else 3
program.save(sys.argv[1], {"mine": mine})
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_all_processes_must_give_the_same(tmp_path: Path) -> None:
    """Else a part would be lacking, or they would wait for each other."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "weft", "run", "-n", "2", str(script), str(tmp_path / "saved")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert ended.returncode == 1
    assert "extra: global tensors must be the same on all" in ended.stderr
    assert json.dumps("extra.laid.mine") in ended.stderr
    assert not (tmp_path / "saved").exists()


def test_partial_ones_are_refused(tmp_path: Path) -> None:
    with compiled(SHARDED) as (program, _):
        tensor = weft.zeros(4, placement=program.placement, sbp=weft.partial("sum"))
        with pytest.raises(UserError, match=r"extra\.a is a global tensor .*tensor\.full\(\)"):
            program.save(tmp_path / "saved", {"a": tensor})
