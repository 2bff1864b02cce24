"""Checkpoints of torch.distributed.checkpoint's default format are imported, and their pickles execute nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from program.checkpoint.nets import Case, assert_same, batch_of, compiled, everything, loss_fn
from weft.errors import DamagedCheckpoint, UserError
from weft.program.checkpoint.exported import METADATA, Distcp, import_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = Case(seed=seed).parts()
    loss_fn(model, batch_of(0)).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("nested", [True, False], ids=["model and optimizer", "a model alone"])
def test_it_is_imported(nested: bool, tmp_path: Path) -> None:
    model, optimizer = trained(8)
    state: dict[str, Any] = dict(model.state_dict())
    if nested:
        state = {"model": state, "optimizer": get_optimizer_state_dict(model, optimizer)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "plain"), no_dist=True)
    import_model(tmp_path / "plain", tmp_path / "imported")
    with compiled(Case((3,), seed=5)) as (program, _):
        program.load(tmp_path / "imported")
        assert_same(program.full_state_dict(), dict(model.state_dict()))
        states = everything(program)
        if nested:
            number = [name for name, _ in model.named_parameters()].index("first.weight")
            expected = optimizer.state[model.first.weight]["exp_avg"]  # type: ignore[union-attr, index]
            assert torch.equal(states[f"{number}.exp_avg"], expected)


@pytest.mark.one_process_outside("one process reads and breaks what all have saved")
def test_what_stands_beside_the_model(tmp_path: Path) -> None:
    """A counter is left out; a model that stands elsewhere is told."""
    model, _ = trained(8)
    state = {"model": dict(model.state_dict()), "step": torch.tensor(5)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "plain"), no_dist=True)
    import_model(tmp_path / "plain", tmp_path / "imported")
    with compiled(Case((3,), seed=5)) as (program, _):
        program.load(tmp_path / "imported")
        assert_same(program.full_state_dict(), dict(model.state_dict()))
    save({"app": state}, storage_writer=FileSystemWriter(tmp_path / "app"), no_dist=True)
    with pytest.raises(UserError, match="its entries are under app"):
        import_model(tmp_path / "app", tmp_path / "none")
    assert not (tmp_path / "none").exists()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def _with(change: Any) -> of_torch.Metadata:
    made = of_torch.Metadata({}, {}, {})
    change(made)
    return made


HOSTILE: dict[str, Any] = {
    "a call": Evil(),
    "a call inside": _with(lambda made: made.state_dict_metadata.update(x=Evil())),
    "another object": {"a": 1},
    "text": "metadata",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_executed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / METADATA).write_bytes(pickle.dumps(HOSTILE[name], protocol))
        with pytest.raises(DamagedCheckpoint, match="metadata"):
            Distcp(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'touch executed'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'touch executed'\ntR.",
        b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x0eos.path.exists\x93\x8c\x01x\x85R.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"",
        b"\x80\x04",
    ],
)
def test_hostile_bytes(code: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(code)
    with pytest.raises(DamagedCheckpoint):
        Distcp(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [METADATA]


def test_cut_files_are_told(tmp_path: Path) -> None:
    model, _ = trained(8)
    save(
        dict(model.state_dict()), storage_writer=FileSystemWriter(tmp_path / "plain"), no_dist=True
    )
    (shard,) = (tmp_path / "plain").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        import_model(tmp_path / "plain", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
