"""Manifests that a hand has changed: whoever reads them takes what they say, or says by a UserError what is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from program.checkpoint.nets import Case, assert_same, batch_of, compiled, everything
from weft.errors import DamagedCheckpoint, UserError
from weft.program.checkpoint.exported import export
from weft.program.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.one_process_outside("one process breaks what all have saved")

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 1.5, float("nan"), float("inf"), 1 << 70, 10**400),
    *("", "float32", "float64", "int64", "complex64", "load", "no such", "x\0.safetensors"),
    *("\ud800", "../x.safetensors", [], [[]], [0], [0, -1], [1 << 61, 0], [[0, 1], [0, 1]]),
    *([1] * 70, {}, {"a": 1}, {"__weft__": "tensor", "name": "extra.0"}, {"__weft__": "dict"}),
)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in a tree of JSON."""
    if path:
        yield path
    items = content.items() if isinstance(content, dict) else ()
    for key, each in items or (enumerate(content) if isinstance(content, list) else ()):
        yield from places(each, (*path, key))


def changed(text: str, draw: random.Random) -> str:
    """The text with an odd value at one place, or one place under another key, or without it."""
    content = json.loads(text)
    # Tensors have many places that are alike; what is no tensor counts as much.
    head = draw.choice(("about", "tensors"))
    path = draw.choice([each for each in places(content) if each[0] == head])
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    match draw.randrange(6):
        case 0 if isinstance(inner, dict):
            inner[draw.choice(("", "extra.0", "model.", "optimizer.state.", "\ud800"))] = inner.pop(
                path[-1]
            )
        case 1:
            del inner[path[-1]]
        case _:
            inner[path[-1]] = draw.choice(ODD)
    return json.dumps(content)


def _saved(folder: Path) -> Path:
    case = Case((2,), {"precision": weft.Precision(masters=True)}, dtype=torch.bfloat16)
    with compiled(case) as (program, _):
        program.step(batch_of(0))
        program.save(folder / "saved", {"more": (1, torch.arange(6)), "score": 2.0})
    return folder / "saved"


@pytest.mark.parametrize("seed", range(6))
def test_only_errors_of_users_leave(seed: int, tmp_path: Path) -> None:
    place, draw = _saved(tmp_path), random.Random(seed)
    text = (place / "weft.json").read_text()
    kept, refused = weft.Checkpoints(tmp_path), 0
    place = place.rename(tmp_path / "step-00000001")
    case = Case((1,), {"precision": weft.Precision(masters=True)}, dtype=torch.bfloat16)
    with compiled(case) as (program, _):
        before = everything(program)
        for number in range(30):
            (place / "weft.json").write_text(changed(text, draw))
            try:
                program.load(place)
            except UserError:
                refused += 1
                assert_same(everything(program), before)
            else:
                before = everything(program)
            with suppress(UserError):
                export(place, tmp_path / f"out{number}", masters=bool(number % 2))
            kept._take_away(1)
    assert 5 < refused < 30


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("dtype",), "float16", r"its values are of float64, expected float16"),
        (("dtype",), "load", "a tensor is of no dtype 'load'"),
        (("shape",), [10.0], r"10\.0 is not a whole number"),
        (("shape",), "10", "'1' is not a whole number"),
        (("shape",), [0, -1], "-1 is not a whole number"),
        (("shape",), [1 << 61, 0], "no tensor has the shape"),
        (("shape",), [1] * 70, "no tensor has the shape"),
        (("extents", 0, 2), [[0.5, 10]], r"0\.5 is not a whole number"),
        (("extents", 0, 1), 3, "3 is not a name of a tensor"),
        (("extents", 0, 3), -1, "-1 is not a whole number"),
    ],
    ids=str,
)
def test_odd_tensors_are_told(path: tuple[Any, ...], value: Any, why: str, tmp_path: Path) -> None:
    with compiled(Case()) as (program, _):
        program.save(tmp_path / "saved")
        manifest = tmp_path / "saved" / "weft.json"
        content = json.loads(manifest.read_text())
        inner = content["tensors"]["model.last.bias"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        manifest.write_text(json.dumps(content))
        with pytest.raises(DamagedCheckpoint, match=why):
            program.load(tmp_path / "saved")


def test_complex_numbers_are_no_real_ones(tmp_path: Path) -> None:
    """Halves of numbers would be lost."""
    first, second = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    first.weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with weft.local_world(1):
        for number, model in enumerate((first, second)):
            program = weft.compile(
                *(model, lambda net, x: net.weight.abs().sum() * x.sum()),
                *(torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2)),
                placement=weft.placement("cpu", [0]),
            )
            if not number:
                program.save(tmp_path / "saved")
            else:
                with pytest.raises(UserError, match=r"model\.weight is of float32 .*complex64"):
                    program.load(tmp_path / "saved")
            program.close()


def test_a_manifest_as_it_was_is_read(tmp_path: Path) -> None:
    assert read_manifest(_saved(tmp_path)).tensors
