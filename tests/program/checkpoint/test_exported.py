"""Checkpoints as the files of Hugging Face, and those files as checkpoints, read by other libraries."""

from __future__ import annotations

import json
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from typer.testing import CliRunner

import weft
from program.checkpoint.nets import Case, assert_same, batch_of, compiled
from weft.cli.main import app
from weft.errors import DamagedCheckpoint, UserError
from weft.program.checkpoint import exported
from weft.program.checkpoint.exported import INDEX, export, import_model
from weft.units import Bytes

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.one_process_outside("one process exports what all have saved")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of four ranks, and the model that it holds."""
    with compiled(Case((4,), {"zero": weft.Zero(3)})) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        return tmp_path / "saved", program.full_state_dict()


def test_files_with_an_index(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    done = export(saved[0], tmp_path / "out", Bytes(1200))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*files, INDEX}
    found = {file: load_file(tmp_path / "out" / file) for file in files}
    assert_same({n: found[file][n] for n, file in index["weight_map"].items()}, saved[1])
    assert index["metadata"]["total_size"] == done.bytes
    assert done.bytes == sum(x.nbytes for each in found.values() for x in each.values())
    for each in found.values():
        assert len(each) == 1 or sum(x.nbytes for x in each.values()) <= 1200


def test_one_file_rounded(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    export(saved[0], tmp_path / "out", dtype="bfloat16")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    rounded = {n: x.bfloat16() if x.is_floating_point() else x for n, x in saved[1].items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), rounded)


def test_masters(tmp_path: Path) -> None:
    strategy = {"precision": weft.Precision(masters=True)}
    with compiled(Case((2,), strategy, dtype=torch.bfloat16)) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        wide = program.full_state_dict(masters=True)
    export(tmp_path / "saved", tmp_path / "out", masters=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["first.weight"].dtype == torch.float32
    assert_same({name: found[name] for name in wide}, wide)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 17}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def llama_loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


@pytest.mark.parametrize("imported", [True, False])
def test_there_and_back_with_transformers(imported: bool, tmp_path: Path) -> None:
    """Of tied weights its files hold one."""
    batch = torch.randint(17, (4, 6))
    first, plain = llama(), llama()
    first.save_pretrained(tmp_path / "first", max_shard_size="2KB")
    source = tmp_path / "first"
    assert "lm_head.weight" not in json.loads((source / INDEX).read_text())["weight_map"]
    if imported:
        import_model(source, tmp_path / "imported")
        source = tmp_path / "imported"
    model = llama()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.local_world(2):
        program = weft.compile(
            *(model, llama_loss, optimizer, batch),
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.data_parallel(),
        )
        program.load(source)
        program.step(batch)
        program.save(tmp_path / "saved")
        program.close()
    llama_loss(plain, batch).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    export(tmp_path / "saved", tmp_path / "out", Bytes(2000))
    plain.config.save_pretrained(tmp_path / "out")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    """No file has its rotary buffers; the model's own way makes them."""
    batch = torch.randint(17, (4, 6))
    plain = llama()
    plain.save_pretrained(tmp_path / "files")
    with torch.device("meta"):
        model = llama()
    with weft.local_world(2):
        program = weft.compile(
            *(model, llama_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch),
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
            weights=tmp_path / "files",
        )
        found = float(program.step(batch))
        program.close()
    assert found == pytest.approx(llama_loss(plain, batch).item(), rel=1e-5)


def test_what_cannot_be(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    place = saved[0]
    with pytest.raises(UserError, match="is not a checkpoint"):
        export(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(UserError, match="exists"):
        export(place, place)
    with pytest.raises(UserError, match="dtype must be one of"):
        export(place, tmp_path / "out", dtype="bf16")
    with pytest.raises(UserError, match="is a checkpoint already"):
        import_model(place, tmp_path / "out")
    shard = min(place.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(DamagedCheckpoint, match=shard.name):
        export(place, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"saved"}


def test_the_commands(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    place, out, again = str(saved[0]), str(tmp_path / "out"), str(tmp_path / "again")
    done = CliRunner().invoke(app, ["export", place, out])
    assert (done.exit_code, f"{len(saved[1])} tensors" in done.output) == (0, True)
    done = CliRunner().invoke(app, ["import", out, again])
    assert (done.exit_code, f"{len(saved[1])} tensors" in done.output) == (0, True)
    with compiled(Case((3,), seed=5)) as (program, _):
        program.load(again)
        assert_same(program.full_state_dict(), saved[1])
    other = str(tmp_path / "other")
    done = CliRunner().invoke(app, ["import", out, other, "--rename", "^first=second"])
    assert done.exit_code == 0
    with compiled(Case((3,), seed=5)) as (program, _):
        with pytest.raises(UserError, match=r"lacks first\.bias, first\.weight, and has second\.b"):
            program.load(other)
        program.load(weft.Weights(other, {"^second": "first"}))
        assert_same(program.full_state_dict(), saved[1])
    done = CliRunner().invoke(app, ["import", out, str(tmp_path / "no"), "--rename", "first"])
    assert done.exit_code == 2
    assert "PATTERN=REPLACEMENT" in done.output
    done = CliRunner().invoke(app, ["export", again, out])
    assert done.exit_code == 2
    assert "exists" in done.output


@pytest.mark.parametrize("error", [SafetensorError("No space"), OSError(ENOSPC, "No space")])
def test_a_full_disk_is_told_and_nothing_is_left(
    error: Exception,
    saved: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(exported, "save_file", full)
    with pytest.raises(UserError, match="cannot write .*: No space"):
        export(saved[0], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
