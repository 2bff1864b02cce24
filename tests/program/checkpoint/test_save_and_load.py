"""What one program saves another goes on from, in any layout, and plain PyTorch reads."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import weft
from mutations import mutated
from program.checkpoint.nets import Case, assert_same, batch_of, compiled, everything, loss_fn
from single_device import is_first
from weft.errors import DamagedCheckpoint, UserError
from weft.program.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.one_process_outside("one process reads and breaks what all have saved")

ROWS = {"first.weight": (weft.broadcast, weft.split(0)), "*": (weft.broadcast, weft.broadcast)}
HALVES = (
    weft.Stage(("embedding", "head", "unused"), weft.placement("cpu", [0, 1])),
    weft.Stage(("first", "norm", "last", "dropout"), weft.placement("cpu", [2])),
)
CASES = [
    Case(),
    Case((2,)),
    Case((3,), {"zero": weft.Zero(1)}),
    Case((2,), {"zero": weft.Zero(3)}),
    Case((5,), {"zero": weft.Zero(3)}),
    Case((2, 2), {"parameters": ROWS}),
    Case((4, 2), {"parameters": ROWS, "zero": weft.Zero(2)}),
]


def _pairs() -> list[tuple[Case, Case]]:
    every = [(one, other) for one in CASES for other in CASES]
    return random.Random(0).sample(every, 20) + [(each, each) for each in CASES]


@pytest.mark.parametrize("pair", _pairs(), ids=lambda pair: f"{pair[0].grid} to {pair[1].grid}")
def test_training_goes_on_in_another_layout(pair: tuple[Case, Case], tmp_path: Path) -> None:
    """Everything is bit-equal after the load; the run goes on as if it had never been interrupted."""
    before, after = pair
    with compiled(before) as (program, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(3):
            program.step(batch_of(step))
            schedule.step()
        program.save(tmp_path / "saved", {"schedule": schedule, "more": (1, torch.arange(3))})
        saved = everything(program)
        expected = [float(program.step(batch_of(step))) for step in (3, 4)]
    with compiled(Case(after.grid, after.entries, seed=9)) as (program, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        program.step(batch_of(7))
        extra = program.load(tmp_path / "saved", {"schedule": schedule})
        assert (program.steps, schedule.last_epoch) == (3, 3)
        assert extra["more"][0] == 1
        assert torch.equal(extra["more"][1], torch.arange(3))
        assert_same(everything(program), saved)
        found = [float(program.step(batch_of(step))) for step in (3, 4)]
    same_ranks = before == after
    assert found == (expected if same_ranks else pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize(
    "optimizer",
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": torch.tensor(1e-2), "amsgrad": True}),
        ("NAdam", {"lr": 1e-2}),
        ("Adafactor", {"lr": 1e-2}),
        ("ASGD", {"lr": 1e-2}),
    ],
    ids=lambda each: each[0],
)
def test_states_of_optimizers(optimizer: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    case = Case((2,), {"zero": weft.Zero(1)}, optimizer)
    with compiled(case) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        saved = everything(program)
        expected = float(program.step(batch_of(1)))
    with compiled(Case((3,), {}, optimizer, seed=4)) as (program, _):
        program.load(tmp_path / "saved")
        assert_same(everything(program), saved)
        assert float(program.step(batch_of(1))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fused", [None, False])
def test_states_where_the_default_dtype_is_float64(fused: bool | None, tmp_path: Path) -> None:
    """Fused kernels count steps in float32 all the same, loops in the default dtype."""
    case = Case((2,), {"zero": weft.Zero(3)}, ("AdamW", {"lr": 1e-2, "fused": fused}))
    torch.set_default_dtype(torch.float64)
    try:
        with compiled(case) as (program, _):
            program.step(batch_of(0))
            program.save(tmp_path / "saved")
            saved = everything(program)
        with compiled(replace(case, grid=(1,), seed=4)) as (program, _):
            program.load(tmp_path / "saved")
            assert_same(everything(program), saved)
            assert saved["0.step"].dtype == (torch.float32 if fused is None else torch.float64)
            program.step(batch_of(1))
    finally:
        torch.set_default_dtype(torch.float32)


class Counting(torch.optim.Optimizer):
    """Keeps numbers alone, one of them not finite."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter]
                    kept["count"], kept["worst"] = kept.get("count", 0) + 1, float("inf")
                    parameter.add_(parameter.grad, alpha=-group["lr"] / kept["count"])


@pytest.mark.parametrize("after", [1, 2, 3])
def test_states_that_are_numbers(after: int, tmp_path: Path) -> None:
    batch, losses = torch.ones(6, 4), list[list[float]]()
    for ranks in (2, after):
        torch.manual_seed(ranks)
        model = torch.nn.Linear(4, 4).double()
        with weft.local_world(ranks):
            program = weft.compile(
                *(model, lambda m, b: m(b.double()).square().mean()),
                *(Counting(model.parameters()), batch),
                placement=weft.placement("cpu", list(range(ranks))),
            )
            if not losses:
                for _ in range(3):
                    program.step(batch)
                program.save(tmp_path / "saved")
            else:
                program.load(tmp_path / "saved")
            losses.append([float(program.step(batch)) for _ in range(2)])
            program.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_before_the_first_step(tmp_path: Path) -> None:
    """There are no states yet; those of the program that loads begin anew."""
    with compiled(Case((2,))) as (program, _):
        program.save(tmp_path / "saved")
        expected = [float(program.step(batch_of(step))) for step in range(2)]
    with compiled(Case((3,), seed=5)) as (program, optimizer):
        program.step(batch_of(9))
        program.load(tmp_path / "saved")
        found = [float(program.step(batch_of(step))) for step in range(2)]
        assert optimizer.state
    assert found == pytest.approx(expected, rel=1e-12)


def test_stages(tmp_path: Path) -> None:
    """A rank holds only what its stage has."""
    pipeline = {"stages": HALVES, "micro_batches": 2, "batch": {"*": weft.split(0)}}
    case = Case((3,), pipeline)
    with compiled(case) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        saved = everything(program)
        expected = float(program.step(batch_of(1)))
    with compiled(case) as (program, _):
        program.load(tmp_path / "saved")
        assert_same(everything(program), saved)
        assert float(program.step(batch_of(1))) == expected
    with compiled(Case((2,), seed=3)) as (program, _):
        program.load(tmp_path / "saved")
        assert_same(everything(program), saved)


HALF = weft.Precision(masters=True)


def test_masters_go_on_where_they_were(tmp_path: Path) -> None:
    """Of a model of half precision; a wide one takes its values from them."""
    case = Case((2,), {"precision": HALF}, dtype=torch.bfloat16)
    with compiled(case) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        masters = program.full_state_dict(masters=True)
        expected = float(program.step(batch_of(1)))
    with compiled(Case((2,), {"precision": HALF}, dtype=torch.bfloat16, seed=2)) as (program, _):
        program.load(tmp_path / "saved")
        assert_same(program.full_state_dict(masters=True), masters)
        assert float(program.step(batch_of(1))) == expected
    with compiled(Case((1,), dtype=torch.float32, seed=2)) as (program, _):
        program.load(tmp_path / "saved")
        wide = program.full_state_dict()
        for name in ("first.weight", "head.weight"):
            assert torch.equal(wide[name], masters[name])


class Quantized(torch.nn.Module):
    """A frozen product of float8, with its scales."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(6, 4).to(torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.rand(6).to(torch.float8_e5m2))
        self.last = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x @ self.weight.float().T * self.scale.float())


@pytest.mark.parametrize("parameters", [{}, {"weight": weft.split(0)}], ids=["whole", "split"])
def test_parameters_and_buffers_of_float8(parameters: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Quantized(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD([*model.last.parameters()], lr=0.1)
    strategy = weft.Strategy(batch={"*": weft.split(0)}, parameters=parameters)
    with weft.local_world(2):
        program = weft.compile(
            *(model, lambda model, x: model(x).square().mean(), optimizer, batch),
            placement=weft.placement("cpu", [0, 1]),
            strategy=strategy,
        )
        loss = program.step(batch).item()
        assert loss == pytest.approx(plain(batch).square().mean().item(), rel=1e-6)
        program.save(tmp_path / "saved")
        with torch.no_grad():
            model.weight.fill_(1), model.scale.fill_(1)
        program.load(tmp_path / "saved")
        found = program.full_state_dict()
        program.close()
    for name in ("weight", "scale"):
        expected = plain.state_dict()[name]
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8))


def test_the_scale_of_losses(tmp_path: Path) -> None:
    fp16 = Case((2,), {"precision": weft.Precision("fp16")}, dtype=torch.float32)
    with compiled(fp16) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
    names = tensors_in(tmp_path / "saved")
    assert any(name.startswith("scale.") for name in names)
    with compiled(fp16) as (program, _):
        program.load(tmp_path / "saved")


def tensors_in(folder: Path) -> list[str]:
    return list(read_manifest(folder).tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_pytorch_reads_it(tmp_path: Path) -> None:
    """Under the names that a single device has."""
    with compiled(Case((4,), {"zero": weft.Zero(3)})) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        saved = program.full_state_dict()
        states = program.full_optimizer_state_dict()["state"]
    model, _ = Case(seed=8).parts()
    moments = {"first.weight": {"exp_avg": torch.zeros(14, 10, dtype=torch.float64)}}
    state = {"model": model.state_dict(), "optimizer": {"state": moments}}
    load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "saved")), no_dist=True)
    assert_same(dict(model.state_dict()), saved)
    number = [name for name, _ in model.named_parameters()].index("first.weight")
    assert torch.equal(moments["first.weight"]["exp_avg"], states[number]["exp_avg"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("named", [True, False], ids=["under model", "plain names"])
def test_what_plain_pytorch_wrote_is_read(named: bool, tmp_path: Path) -> None:
    model, _ = Case(seed=8).parts()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    writer = HuggingFaceStorageWriter(str(tmp_path / "plain"))
    save({"model": state} if named else state, storage_writer=writer, no_dist=True)
    with compiled(Case((3,), {"zero": weft.Zero(3)})) as (program, _):
        assert program.load(tmp_path / "plain") == {}
        assert_same(program.full_state_dict(), state)


def test_a_model_alone_leaves_states_and_steps(tmp_path: Path) -> None:
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved")
        saved = program.full_state_dict()
        program.step(batch_of(1))
        states = program.full_optimizer_state_dict()["state"]
        program.load(tmp_path / "saved", model_only=True)
        assert program.steps == 2
        assert_same(program.full_state_dict(), saved)
        after = program.full_optimizer_state_dict()["state"]
    assert states.keys() == after.keys() != set()
    for number, entries in states.items():
        assert_same(entries, after[number])


def _folder(path: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str]) -> Path:
    path.mkdir()
    for file, tensors in files.items():
        save_file(tensors, path / file)
    if index:
        text = json.dumps({"weight_map": index})
        (path / "model.safetensors.index.json").write_text(text)
    return path


@pytest.mark.one_process("each process would move the files of all")
def test_files_that_lie_beside_do_not_count(tmp_path: Path) -> None:
    """An index decides, or model.safetensors; else each tensor must stand once."""
    model, _ = Case(seed=8).parts()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    others = {name: torch.zeros_like(value) for name, value in state.items()}
    halves = [dict(list(state.items())[:6]), dict(list(state.items())[6:])]
    indexed = {"a.safetensors": halves[0], "b.safetensors": halves[1], "zz.safetensors": others}
    index = {name: file for file in ("a.safetensors", "b.safetensors") for name in indexed[file]}
    alone = {"model.safetensors": state, "consolidated.safetensors": {"x": torch.ones(2)}}
    with compiled(Case((2,))) as (program, _):
        for number, (files, places) in enumerate([(indexed, index), (alone, {})]):
            program.load(_folder(tmp_path / str(number), files, places))
            assert_same(program.full_state_dict(), state)
        with pytest.raises(DamagedCheckpoint, match=r"in a\.safetensors, zz\.safetensors"):
            program.load(_folder(tmp_path / "twice", indexed, {}))
        gone = dict.fromkeys(index, "c.safetensors")
        with pytest.raises(DamagedCheckpoint, match=r"c\.safetensors is missing"):
            program.load(_folder(tmp_path / "gone", indexed, gone))


@pytest.mark.one_process("each process would move the files of all")
def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "notes").write_text("mine")
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0))
        for name in ("runs", "notes"):
            with pytest.raises(UserError, match="is not a checkpoint, and is not replaced"):
                program.save(tmp_path / name, replace=True)
        program.save(tmp_path / "saved", replace=True)
        program.step(batch_of(1))
        program.save(tmp_path / "saved", replace=True)
        (tmp_path / "saved").rename(
            tmp_path / ".saved.x.replaced"
        )  # as a run leaves it that is killed
        assert program.load(tmp_path / "saved") == {}
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "notes", "saved"}


# ---------------------------------------------------------------- what does not fit


def _saved(tmp_path: Path, case: Case | None = None) -> Path:
    with compiled(case or Case((2,))) as (program, _):
        program.step(batch_of(0))
        program.save(tmp_path / "saved", {"a": 1})
    return tmp_path / "saved"


def test_another_optimizer_is_told(tmp_path: Path) -> None:
    place = _saved(tmp_path)
    other = "AdamW", {"lr": 0.1, "amsgrad": True}
    with compiled(Case((2,), optimizer=other)) as (program, _):
        before = everything(program)
        with pytest.raises(UserError, match=r"states exp_avg, exp_avg_sq, step of .*max_exp_avg"):
            program.load(place)
        assert_same(everything(program), before)


def test_another_seed_is_told(tmp_path: Path) -> None:
    place = _saved(tmp_path)
    with compiled(Case((2,)), draws=4) as (program, _), pytest.raises(UserError, match="seed=3"):
        program.load(place)


def test_an_extra_that_is_not_there(tmp_path: Path) -> None:
    place = _saved(tmp_path)
    with compiled(Case((1,))) as (program, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        with pytest.raises(UserError, match=r"no extra 'b'; it has \['a'\]"):
            program.load(place, {"b": schedule})


def test_gradients_that_wait_are_told(tmp_path: Path) -> None:
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0), update=False)
        with pytest.raises(UserError, match="parameter.grad holds gradients"):
            program.save(tmp_path / "saved")
        if is_first():  # it takes away what it has begun
            assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, "", b"x", "a\0b"])
def test_no_path(path: Any) -> None:
    with compiled(Case()) as (program, _):
        for call in (program.save, program.load):
            with pytest.raises(UserError, match="a checkpoint is a folder|printable"):
                call(path)


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    place = _saved(tmp_path)
    with compiled(Case()) as (program, _), pytest.raises(UserError, match="exists"):
        program.save(place)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with compiled(Case()) as (program, _), pytest.raises(UserError, match="cannot write"):
        program.save(tmp_path / "file" / "saved")


def test_extra_that_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    with compiled(Case((2,))) as (program, _):
        with pytest.raises(UserError, match=r"extra\.f is a"):
            program.save(tmp_path / "saved", {"f": print})
        if is_first():  # it takes away what it has begun
            assert list(tmp_path.iterdir()) == []
        program.step(batch_of(0))


# ---------------------------------------------------------------- damage


def _damages(place: Path) -> dict[str, Any]:
    shard = sorted(place.glob("shard-*"))[0]
    data = shard.read_bytes()
    text = (place / "weft.json").read_text()
    plain = _unsummed(text)
    return {
        "gone": lambda: shard.unlink(),
        "empty": lambda: shard.write_bytes(b""),
        "cut": lambda: shard.write_bytes(data[:-9]),
        "a bit": lambda: shard.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
        "header": lambda: shard.write_bytes(b"\xff" * 16 + data[16:]),
        "manifest cut": lambda: (place / "weft.json").write_text(text[: len(text) // 2]),
        "manifest": lambda: (place / "weft.json").write_text("[]"),
        "a number": lambda: (place / "weft.json").write_text(text.replace('"steps": 1', '"steps": 7')),
        "a rate": lambda: (place / "weft.json").write_text(text.replace('"lr": 0.01', '"lr": 0.81')),
        "version": lambda: (place / "weft.json").write_text(plain.replace("checkpoint\": 1", "checkpoint\": 9")),
        "outside": lambda: (place / "weft.json").write_text(plain.replace("shard-", "../shard-")),
    }  # fmt: skip


def _unsummed(text: str) -> str:
    """The text of a manifest without the checksum of it."""
    found, number = re.subn(r'\A\{\n "checksum": \d+,', "{", text)
    assert number == 1
    return found


KINDS = (
    "gone",
    "empty",
    "cut",
    "a bit",
    "header",
    "manifest cut",
    "manifest",
    "a number",
    "a rate",
    "version",
    "outside",
)


@pytest.mark.parametrize("damage", KINDS)
def test_damage_is_named_before_anything_is_written(damage: str, tmp_path: Path) -> None:
    place = _saved(tmp_path)
    _damages(place)[damage]()
    with compiled(Case((3,), seed=6)) as (program, _):
        before = everything(program)
        with pytest.raises(UserError, match=r"shard-00001|weft\.json"):
            program.load(place)
        assert_same(everything(program), before)
        program.step(batch_of(1))


def _edited(place: Path, edit: Any) -> None:
    content = json.loads((place / "weft.json").read_text())
    edit(content)
    (place / "weft.json").write_text(json.dumps(content))


def _twice_the_same(content: Any) -> None:
    boxes = content["tensors"]["optimizer.state.first.weight.exp_avg"]["extents"]
    boxes[1:] = [boxes[0]]


HOSTILE = {
    "a box twice": _twice_the_same,
    "a box outside": lambda c: c["tensors"]["model.last.bias"]["extents"][0][2].__setitem__(
        0, [-1, 10]
    ),
    "a tensor gone": lambda c: c["tensors"].pop("optimizer.state.last.bias.exp_avg"),
    "another tensor": lambda c: c["tensors"]["model.last.bias"].__setitem__(
        "extents", [["shard-00001-model-00001.safetensors", "no such", [[0, 10]], None]]
    ),
    "steps": lambda c: c["about"].__setitem__("steps", []),
    "groups": lambda c: c["about"]["groups"].__setitem__(0, "x"),
    "an option": lambda c: c["about"]["groups"][0][0].__setitem__("betas", "__class__"),
    "extra": lambda c: c["about"].__setitem__("extra", [[[]]]),
    "a shape without end": lambda c: c["tensors"]["model.last.bias"].__setitem__(
        "shape", [float("inf")]
    ),
    "a sum without end": lambda c: c["tensors"]["model.last.bias"]["extents"][0].__setitem__(
        3, float("inf")
    ),
    "a box of another tensor": lambda c: c["tensors"]["model.last.bias"].__setitem__(
        "extents", [["shard-00001-model-00001.safetensors", "model.first.bias", [[0, 10]], None]]
    ),
    "a huge number": lambda c: c["about"].__setitem__(
        "extra", {"__weft__": "float", "value": HUGE}
    ),
    "a huge option": lambda c: c["about"]["groups"][0][0].__setitem__("lr", HUGE),
    "huge steps": lambda c: c["about"].__setitem__("steps", HUGE),
    "numbers": lambda c: c["about"].__setitem__("numbers", [3]),
    "numbers of a parameter": lambda c: c["about"].__setitem__("numbers", {"last.bias": 3}),
}
HUGE = 10**400


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_manifests_are_told_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    place = _saved(tmp_path, Case((2,), {"zero": weft.Zero(3)}))
    _edited(place, HOSTILE[kind])
    with compiled(Case((3,), seed=6)) as (program, _):
        before = everything(program)
        with pytest.raises(DamagedCheckpoint):
            program.load(place)
        assert_same(everything(program), before)


def test_manifests_with_mistakes_are_read_or_told(tmp_path: Path) -> None:
    """A program takes all that a manifest says, or stays as it was."""
    place = _saved(tmp_path)
    text = _unsummed((place / "weft.json").read_text())
    with compiled(Case()) as (program, _):
        before, refused = everything(program), 0
        for broken in mutated(text, 200):
            (place / "weft.json").write_text(broken)
            try:
                program.load(place)
            except UserError:
                refused += 1
                assert_same(everything(program), before)
            else:
                before = everything(program)
    assert 100 < refused < 200


@pytest.mark.parametrize(
    "sharding",
    [
        "[" * 100_000,
        "3",
        '{"w": {"saved_offsets": ["0", "0"]}}',
        '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [1e999, 0]}}',
        '{"w": {"saved_offsets": [-1, 0]}}',
        '{"w": {"saved_offsets": 7}}',
    ],
)
def test_headers_of_others_with_mistakes_are_told(sharding: str, tmp_path: Path) -> None:
    about = {"format": "pt", "DCP_SHARDING_INFO": sharding}
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "a.safetensors", about)
    with pytest.raises(DamagedCheckpoint, match=r"a\.safetensors.* is missing or damaged"):
        read_manifest(tmp_path)


def test_boxes_of_others_that_do_not_fit_are_told(tmp_path: Path) -> None:
    for file, value in (("a", torch.zeros(2, 3)), ("b", torch.zeros(2))):
        save_file({"w": value}, tmp_path / f"{file}.safetensors")
    with pytest.raises(DamagedCheckpoint, match="is damaged: ValueError"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_gone_is_told(tmp_path: Path) -> None:
    """Files of weft are not taken for those of another program."""
    place = _saved(tmp_path)
    (place / "weft.json").unlink()
    with (
        compiled(Case((2,))) as (program, _),
        pytest.raises(DamagedCheckpoint, match=r"weft\.json"),
    ):
        program.load(place)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    place = _saved(tmp_path)
    shard = min(place.glob("shard-*"))
    shard.unlink()
    os.mkfifo(shard)
    with compiled(Case((2,))) as (program, _), pytest.raises(DamagedCheckpoint, match="not a file"):
        program.load(place)


@pytest.mark.parametrize("given", [{"b": None}, {"a": torch.nn.Linear(2, 2)}])
def test_extras_that_do_not_fit_leave_the_program_as_it_was(
    given: dict[str, Any], tmp_path: Path
) -> None:
    place = _saved(tmp_path)
    with compiled(Case((2,), seed=6)) as (program, _):
        before = everything(program)
        with pytest.raises(UserError, match=r"no extra 'b'|the extra 'a', a Linear, cannot load"):
            program.load(place, given)
        assert program.steps == 0
        assert_same(everything(program), before)


def test_extra_of_a_dtype_that_files_have_not(tmp_path: Path) -> None:
    with compiled(Case()) as (program, _), pytest.raises(UserError, match="complex128"):
        program.save(tmp_path / "saved", {"x": torch.zeros(2, dtype=torch.complex128)})


def test_an_evaluation_program_loads_what_training_saved(tmp_path: Path) -> None:
    place = _saved(tmp_path)
    with compiled(Case((2,), seed=6)) as (program, _):
        held_out = program.evaluation(loss_fn, batch_of(1))
        held_out.load(place)
        found = float(held_out.step(batch_of(1)))
        program.load(place)
        assert found == float(held_out.step(batch_of(1)))


def test_gradients_that_wait_are_not_mixed_with_what_is_loaded(tmp_path: Path) -> None:
    place = _saved(tmp_path)
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0), update=False)
        with pytest.raises(UserError, match=r"program\.load: parameter.grad holds gradients"):
            program.load(place)


def test_two_saves_to_one_path_do_not_mix(tmp_path: Path) -> None:
    """The later one is told; what is there is whole."""
    with compiled(Case((2,))) as (program, _):
        program.save(tmp_path / "saved", wait=False)
        program.step(batch_of(0))
        with pytest.raises(UserError, match="exists|another one"):
            program.save(tmp_path / "saved", wait=False)
        assert [each.name for each in tmp_path.iterdir()] == ["saved"]
        program.load(tmp_path / "saved")
        assert program.steps == 0


def test_no_checkpoint(tmp_path: Path) -> None:
    with compiled(Case()) as (program, _), pytest.raises(UserError, match="is not a checkpoint"):
        program.load(tmp_path / "nothing")
