"""Files in mapped memory are safetensors, as others read them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from weft.errors import UserError
from weft.program.saving.files import Extent, check_extents, checksum, extents_of_file
from weft.program.saving.memory.mapped import FormedFile, MappedFile, form_of, mapped_to_read

DTYPES = [
    *("bool", "uint8", "int16", "uint16", "int32", "float16"),
    *("bfloat16", "float32", "int64", "float64", "complex64"),
]


def values(seed: int) -> dict[str, torch.Tensor]:
    """A tensor of each dtype, none of them of a round size; one without elements, one without dimensions."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 2, (3, 5), generator=generator)
    found = {dtype: drawn.to(getattr(torch, dtype)) for dtype in DTYPES}
    return {**found, "none": torch.zeros(0, 4), "alone": torch.tensor(2.5)}


def test_others_read_what_is_written_in_place(tmp_path: Path) -> None:
    pieces = {
        name: (tuple((2, size) for size in x.shape), str(x.dtype).removeprefix("torch."))
        for name, x in values(0).items()
    }
    file = FormedFile(tmp_path / "a.safetensors", form_of(pieces))
    for seed in (0, 1):
        file.fill(values(seed))
        found = load_file(tmp_path / "a.safetensors")
        assert found.keys() == pieces.keys()
        for name, x in values(seed).items():
            assert found[name].dtype == x.dtype
            assert torch.equal(found[name], x), name
    assert torch.equal(mapped_to_read(tmp_path / "a.safetensors"), file.mapped.bytes)
    assert os.stat(tmp_path / "a.safetensors").st_mode & 0o777 == 0o600
    with safe_open(tmp_path / "a.safetensors", framework="pt") as opened:
        assert "saved_offsets" in opened.metadata()["DCP_SHARDING_INFO"]
    sums = map(checksum, file.tensors)
    check_extents(
        tmp_path,
        [
            (Extent("a.safetensors", name, box.whole, found), box.dtype)
            for (name, box), found in zip(file.form.boxes.items(), sums, strict=True)
        ],
    )
    with pytest.raises(UserError, match="weft.json beside it is gone"):
        extents_of_file(tmp_path, "a.safetensors")


def test_a_dtype_that_files_have_not_is_named() -> None:
    with pytest.raises(UserError, match="^a is of dtype complex128, which safetensors has not"):
        form_of({"a": (((0, 2),), "complex128")})


def test_without_room_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        MappedFile(tmp_path / "a", 100)
    assert not list(tmp_path.iterdir())
