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
from on_ranks import passed
from program.checkpoint.nets import Case, assert_same, batch_of, compiled, loss_fn
from single_device import is_first
from weft.errors import UserError
from weft.program.checkpoint import files
from weft.program.live import live


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
    monkeypatch.setattr(live, "_written", lambda module, *_: filled.append(type(module).__name__))
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
    with weft.local_world(4) as world:
        program = weft.compile(
            *(bare, lambda net, x: net(x).square().mean(), torch.optim.SGD(bare.parameters()), x),
            placement=weft.placement("cpu", [0, 1, 2, 3]),
            strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
            weights=tmp_path,
        )
        held = sum(parameter.numel() for parameter in model.parameters()) // 4
        assert sum(sizes) == held * len(world.ranks)
        assert program.step(x).item() == pytest.approx(model(x).square().mean().item(), rel=1e-5)
        program.close()


def test_what_no_file_has_is_named(tmp_path: Path) -> None:
    model, _ = Case().parts()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del state["first.bias"], state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with (
        pytest.raises(UserError, match=r"lacks first\.bias"),
        begun(CASES[0], tmp_path, meta()),
    ):
        pass
    with (
        pytest.raises(UserError, match="is not a checkpoint"),
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


def renaming(tmp_path: Path, rename: Any) -> dict[str, torch.Tensor]:
    """Write the tensors of a model into files, under the names that `rename` gives, but for those without."""
    model, _ = Case(seed=8).parts()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    named = {rename(name): value for name, value in state.items() if name != "head.weight"}
    save_file(
        {name: value for name, value in named.items() if name}, tmp_path / "model.safetensors"
    )
    return state


def test_files_under_other_names(tmp_path: Path) -> None:
    state = renaming(tmp_path, lambda name: f"net.{name}".replace("weight", "gamma"))
    names = {r"^net\.": "", "gamma$": "weight"}
    with begun(CASES[0], weft.Weights(tmp_path, names), meta()) as program:
        assert_same(program.full_state_dict(), state)
    with (
        pytest.raises(UserError, match=r"weft\.Weights\(folder, names=\{r\"\^net\\\.\": \"\"\}\)"),
        begun(CASES[0], weft.Weights(tmp_path, {"gamma$": "weight"}), meta()),
    ):
        pass


def test_files_of_a_part_say_what_is_around_it(tmp_path: Path) -> None:
    renaming(tmp_path, lambda name: "" if "norm" not in name else name.partition(".")[2])
    with (
        pytest.raises(UserError, match=r'names=\{"\^": "norm\."\}'),
        begun(CASES[0], tmp_path, meta()),
    ):
        pass


@pytest.mark.parametrize("on_meta", [True, False])
def test_what_files_lack_is_as_the_model_makes_it(
    on_meta: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = "first.weight"
    state = renaming(tmp_path, lambda name: "" if name.endswith(lacking) else name)
    save_file({"more": torch.zeros(2)}, tmp_path / "more.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "first.safetensors")
    model = meta() if on_meta else Case(seed=9).parts()[0]
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.raises(UserError, match=r"lacks first\.weight, and has more which"),
        begun(CASES[0], tmp_path, model),
    ):
        pass
    weft.release(model)
    with begun(CASES[0], weft.Weights(tmp_path, strict=False), model) as program:
        found = program.full_state_dict()
        program.step(batch_of(0))
    kept = {name for name in state if not name.endswith(lacking)}
    assert len(kept) < len(state)
    assert_same({name: found[name] for name in kept}, {name: state[name] for name in kept})
    for name in state.keys() - kept:
        assert not torch.equal(found[name], state[name])
        assert found[name].std() > 0 if on_meta else torch.equal(found[name], own[name])
    told = [each.getMessage() for each in caplog.records if " lacks " in each.getMessage()]
    assert len(told) == is_first()
    assert (
        not told
        or "lacks ['first.weight'], which keep their values, and has ['more'], which" in told[0]
    )


def test_a_checkpoint_goes_into_a_model_with_other_parts(tmp_path: Path) -> None:
    """Names are those of the model; shapes must fit all the same, and so must something."""
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        saved = program.full_state_dict()
    with compiled(Case((2,), seed=5)) as (program, _):
        before = program.full_state_dict()
        program.load(weft.Weights(tmp_path / "saved", {"^first.weight$": "gone"}, strict=False))
        assert program.steps == 0
        assert_same(program.full_state_dict(), {**saved, "first.weight": before["first.weight"]})
        program.step(batch_of(1))
        with pytest.raises(UserError, match="is of another model: it lacks"):
            program.load(weft.Weights(tmp_path / "saved", {"^": "no."}, strict=False))
        swapped = {"^first.bias$": "x", "^last.bias$": "first.bias"}
        with pytest.raises(UserError, match="has shape"):
            program.load(weft.Weights(tmp_path / "saved", swapped, strict=False))


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"names": ["a"]}, "names must be a dict of regular expressions"),
        ({"names": {"(": ""}}, "expected a regular expression"),
        ({"strict": 1}, "strict must be True or False"),
    ],
)
def test_weights_of_other_kinds(named: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        weft.Weights("folder", **named)


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    renaming(tmp_path, lambda name: name)
    with (
        pytest.raises(UserError, match="of two tensors"),
        begun(CASES[0], weft.Weights(tmp_path, {".+": "x"}), meta()),
    ):
        pass


@pytest.mark.parametrize("mode", [(), ("other",)])
def test_processes_take_what_there_is(mode: tuple[str, ...], tmp_path: Path) -> None:
    state = {"body.weight": torch.ones(3, 4), "body.bias": torch.full((3,), 2.0)}
    save_file(state, tmp_path / "model.safetensors")
    passed(Path(__file__).with_name("weights_on_processes.py"), 2, str(tmp_path), *mode)
