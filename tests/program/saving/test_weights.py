"""Models on the meta device that begin with the values of files: each rank reads its own parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weft
from program.saving.nets import Case, assert_same, batch_of, compiled, loss_fn
from weft.errors import UserError
from weft.program.live import first_values
from weft.program.saving import files


def meta() -> nn.Module:
    """But for a buffer that no file has."""
    with torch.device("meta"):
        model, _ = Case().parts()
    model.register_buffer("seen", torch.zeros(()), persistent=False)
    return model


@contextmanager
def begun(case: Case, weights: Path, model: nn.Module) -> Iterator[weft.Program]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with weft.local_world(torch.Size(case.grid).numel()):
        program = weft.compile(
            *(model, loss_fn, optimizer, batch_of(0)),
            placement=weft.placement("cpu", torch.arange(4).reshape(case.grid).tolist()),
            strategy=weft.Strategy(**case.entries),
            seed=3,
            weights=weights,
        )
        yield program
        program.close()


CASES = [
    Case((4,), {"batch": {"*": weft.split(0)}, "zero": weft.Zero(3)}),
    Case((4,), {"batch": {"*": weft.split(0)}, "stages": 2, "micro_batches": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=["zero 3", "stages"])
def test_a_checkpoint_s_model(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is filled by its module; steps and the optimizer begin anew."""
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        saved = program.full_state_dict()
    filled: list[str] = []
    monkeypatch.setattr(
        first_values, "_filled", lambda module, *_: filled.append(type(module).__name__)
    )
    with begun(case, tmp_path / "saved", meta()) as program:
        assert program.steps == 0
        assert_same(program.full_state_dict(), saved)
        program.step(batch_of(1))
    assert filled == []


def test_plain_files(tmp_path: Path) -> None:
    model, _ = Case(seed=8).parts()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tied = {name: value for name, value in state.items() if name != "head.weight"}
    save_file(tied, tmp_path / "model.safetensors")
    with begun(CASES[0], tmp_path, meta()) as program:
        assert_same(program.full_state_dict(), state)
        program.step(batch_of(0))


def test_no_rank_reads_more_than_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    read = files.Reading.piece
    sizes: list[int] = []

    def counted(self: Any, extents: Any, whole: Any, into: torch.Tensor) -> None:
        sizes.append(into.numel())
        read(self, extents, whole, into)

    monkeypatch.setattr(files.Reading, "piece", counted)
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    with weft.local_world(4):
        program = weft.compile(
            *(bare, lambda net, x: net(x).square().mean(), torch.optim.SGD(bare.parameters()), x),
            placement=weft.placement("cpu", [0, 1, 2, 3]),
            strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
            weights=tmp_path,
        )
        assert sum(sizes) == sum(parameter.numel() for parameter in model.parameters())
        assert program.step(x).item() == pytest.approx(model(x).square().mean().item(), rel=1e-5)
        program.close()


def test_what_no_file_has_is_named(tmp_path: Path) -> None:
    model, _ = Case().parts()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del state["first.bias"], state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with (
        pytest.raises(UserError, match=r"lacks model\.first\.bias"),
        begun(CASES[0], tmp_path, meta()),
    ):
        pass
    with (
        pytest.raises(UserError, match="is no checkpoint"),
        begun(CASES[0], tmp_path / "none", meta()),
    ):
        pass
    bare = meta()
    bare.register_buffer("seen", torch.zeros((), device="meta"), persistent=False)
    with (
        pytest.raises(UserError, match="^seen are on the meta device; no tensor of these"),
        begun(CASES[0], tmp_path, bare),
    ):
        pass
