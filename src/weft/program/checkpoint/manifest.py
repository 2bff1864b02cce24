"""The manifest of a checkpoint: what it holds, and what is not a tensor. A folder without one is not a checkpoint."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EEXIST
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, final

from weft.errors import UNREADABLE, DamagedCheckpoint, UserError, wrong
from weft.layout.layout import Region, overlap, region_size
from weft.patterns import without_wrappers
from weft.program.checkpoint.files import DTYPES as DTYPES
from weft.program.checkpoint.files import SUFFIX, Extent, extents_of_file, is_shard, to_disk

NAME = "weft.json"
VERSION = 1
# Bytes that a manifest may have.
_MOST = 1 << 30
# Dimensions and elements of a tensor, more than which torch does not take.
_MOST_DIMS, _MOST_ELEMENTS = 64, 1 << 60
# Bits of a mode that files may have.
_OF_FILES = 0o666
# The begin of a manifest's text, with the CRC-32 of all after it.
_SUMMED = re.compile(r'\{\n "checksum": (\d+),')
# Boxes of a tensor of which no two are to overlap.
_COMPARED = 256


@final
@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint: whole shape, dtype as text, and the extents that hold it, together whole."""

    shape: tuple[int, ...]
    dtype: str
    extents: tuple[Extent, ...]


@final
@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint: tensors by name, and what is not a tensor."""

    folder: Path
    tensors: Mapping[str, Stored]
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """The manifest as JSON, which begins with a checksum of the rest."""
        tensors = {
            name: {
                "shape": list(each.shape),
                "dtype": each.dtype,
                "extents": [
                    [extent.file, extent.key, extent.whole, extent.checksum]
                    for extent in each.extents
                ],
            }
            for name, each in self.tensors.items()
        }
        content = {"weft_checkpoint": VERSION, "about": self.about, "tensors": tensors}
        rest = json.dumps(content, indent=1)[1:]
        return f'{{\n "checksum": {zlib.crc32(rest.encode())},{rest}'


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, or of the headers of others' files; raises UserError: it is none, or damaged."""
    path = folder / NAME
    try:
        if not path.exists():
            path = folder
            return _of_headers(folder)
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > _MOST:
            raise ValueError(f"it has more than {_MOST} bytes")
        text = path.read_text()
        found = _SUMMED.match(text)  # earlier ones have no checksum
        if found is not None and zlib.crc32(text[found.end() :].encode()) != int(found[1]):
            raise ValueError("its text is not what was written")
        content = json.loads(text)
        version = content["weft_checkpoint"]
        if version != VERSION:
            raise UserError(
                f"{path} is of version {version!r}, this weft reads {VERSION}; load it with the version of weft that "
                "wrote it"
            )
        tensors = {name: _stored(each) for name, each in content["tensors"].items()}
        about = dict(content["about"])
        lacking = sorted(set(map(str, about.get("names", ()))) - tensors.keys())
        if lacking:
            raise ValueError(f"it lacks {lacking[0]}")
        # For a model in parts of which was torch.compile.
        for name in ("optimizers", "numbers", "tied"):
            if name in about:
                about[name] = json.loads(without_wrappers(json.dumps(about[name])))
        return Manifest(folder, _plainly_named(tensors), about)
    except UNREADABLE as error:
        raise DamagedCheckpoint(
            f"{path} is damaged: {type(error).__name__}: {error}; load another checkpoint"
        ) from None


def _stored(content: Mapping[str, Any]) -> Stored:
    extents = tuple(_extent(*each) for each in content["extents"])
    shape, dtype = tuple(map(_whole, content["shape"])), content["dtype"]
    if dtype not in DTYPES.values():
        raise ValueError(f"a tensor is of no dtype {dtype!r}")
    if len(shape) > _MOST_DIMS or math.prod(size or 1 for size in shape) >= _MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {shape}")
    _check_cover(shape, [extent.whole for extent in extents])
    return Stored(shape, dtype, extents)


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a whole number from 0")
    return number


def _check_cover(shape: tuple[int, ...], boxes: Sequence[Region]) -> None:
    """Boxes are in a tensor, no two share an element, and together they are all of it."""
    for box in boxes:
        if len(box) != len(shape) or any(
            at < 0 or length < 0 or at + length > size
            for (at, length), size in zip(box, shape, strict=True)
        ):
            raise ValueError(f"a box {box} is outside of a tensor of shape {shape}")
    if sum(map(region_size, boxes)) != math.prod(shape):
        raise ValueError(f"the boxes of a tensor of shape {shape} do not cover it")
    for number, box in enumerate(boxes[:_COMPARED]):
        if any(region_size(overlap(box, other)) for other in boxes[:number]):
            raise ValueError(f"two boxes of a tensor of shape {shape} overlap")


def _extent(file: str, key: str, whole: Sequence[Sequence[int]], checksum: int | None) -> Extent:
    if Path(file).name != file or not file.endswith(SUFFIX):
        raise ValueError(f"{file!r} is not a name of a file of a checkpoint")
    if not isinstance(key, str):
        raise ValueError(f"{key!r} is not a name of a tensor")
    region: Region = tuple((_whole(at), _whole(length)) for at, length in whole)
    return Extent(file, key, region, None if checksum is None else _whole(checksum))


def _chosen(folder: Path, files: Sequence[str]) -> dict[str, set[str] | None]:
    """The files to read, by the rules of `transformers`, and the names to read in each; None for all.

    Where `torch.distributed.checkpoint` has written parts of tensors, all do; else an index decides, or the one file
    "model.safetensors", so that files of other programs and older ones beside them do not.
    """
    alone, index = f"model{SUFFIX}", folder / f"model{SUFFIX}.index.json"
    if any(is_shard(folder, file) for file in files):
        return dict.fromkeys(files)
    if index.is_file():
        try:
            places = json.loads(index.read_text())["weight_map"]
            names_of: dict[str, set[str] | None] = {}
            for name, file in places.items():
                wanted = names_of.setdefault(file, set())
                assert wanted is not None
                wanted.add(name)
            lacking = sorted(set(names_of) - set(files))
            if lacking:
                raise ValueError(f"{lacking[0]} is missing")
            return names_of
        except UNREADABLE as error:
            raise DamagedCheckpoint(
                f"{index} is damaged: {type(error).__name__}: {error}; give whole files"
            ) from None
    return {alone: None} if alone in files else dict.fromkeys(files)


def _of_headers(folder: Path) -> Manifest:
    files = sorted(path.name for path in folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not files:
        lacks = f"has neither {NAME} nor {SUFFIX} files" if folder.exists() else "is not there"
        raise UserError(
            f"{folder} is not a checkpoint: it {lacks}; give the folder that program.save has written, or one of "
            "safetensors files"
        )
    extents: dict[str, list[Extent]] = {}
    dtypes: dict[str, str] = {}
    for file, wanted in _chosen(folder, files).items():
        for name, (whole, dtype) in extents_of_file(folder, file).items():
            if wanted is not None and name not in wanted:
                continue
            extents.setdefault(name, []).append(Extent(file, name, whole, None))
            dtypes[name] = DTYPES.get(dtype, dtype)
    tensors = {}
    for name, every in extents.items():
        ends = zip(*[[at + length for at, length in extent.whole] for extent in every], strict=True)
        shape = tuple(map(max, ends))
        try:
            _check_cover(shape, [extent.whole for extent in every])
        except ValueError as error:
            held = ", ".join(sorted({extent.file for extent in every}))
            raise DamagedCheckpoint(
                f"{folder}: {name} in {held}: {error}; give a folder that has each tensor once"
            ) from None
        tensors[name] = Stored(shape, dtypes[name], tuple(every))
    return Manifest(folder, _plainly_named(tensors))


def _plainly_named(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    return {without_wrappers(name): each for name, each in tensors.items()}


def begin(path: Path, replaces: bool = False) -> Path:
    """Make an empty folder, in which a checkpoint for `path` is written. Two at once have two.

    Raises UserError where something is at `path` and is not to be replaced, or nothing can be written there.
    """
    if path.exists() and not replaces:
        raise UserError(f"{path} exists; give a path where nothing is")
    if os.path.lexists(path) and not may_go(path):
        raise UserError(f"{path} is not a checkpoint, and is not replaced; give another path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
    except OSError as error:
        raise UserError(f"cannot write a checkpoint at {path}: {error.strerror}") from None


def check_place(folder: Path) -> None:
    """Raise UserError where no checkpoint can be written into a folder, before work is spent on what it is to hold."""
    abandon(begin(folder / "checkpoint"))


def may_go(path: Path) -> bool:
    """True for a checkpoint, and for an empty folder."""
    return (
        not path.is_symlink()
        and path.is_dir()
        and ((path / NAME).is_file() or not any(path.iterdir()))
    )


def put_back(path: Path) -> None:
    """Put a checkpoint in its place again that another was about to replace when its run was ended."""
    if not path.exists():
        for each in hidden_beside(path, REPLACED)[:1]:
            each.rename(path)


def publish(beside: Path, path: Path, manifest: Manifest, replaces: bool = False) -> None:
    """Move a written checkpoint to its place atomically; the one that it replaces is deleted.

    Raises UserError where a file is missing, as where hosts do not share the folder, or the place cannot be written.
    """
    files = {extent.file for each in manifest.tensors.values() for extent in each.extents}
    missing = sorted(file for file in files if not (beside / file).exists())
    if missing:
        raise UserError(
            f"the first process does not see {missing[0]} in {beside}; give a path on a file system that all hosts "
            "share"
        )
    try:
        (beside / NAME).write_text(manifest.to_text())
        to_disk(beside / NAME)
        if path.exists() and not replaces:
            raise FileExistsError(EEXIST, "another one has been put there meanwhile")
        open_as_usual(beside)
        to_disk(beside)
        old = beside.with_suffix(REPLACED)
        if path.exists():
            path.rename(old)
        beside.rename(path)
        to_disk(path.parent)
        for each in hidden_beside(path, REPLACED):
            shutil.rmtree(each, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write a checkpoint at {path}: {error.strerror}") from None


def open_as_usual(beside: Path) -> None:
    """Give a folder and its files, which were for this user alone until now, the modes of any that are made there."""
    usual = beside / ".mode"
    with suppress(OSError):  # some file systems have no modes
        usual.mkdir()
        mode = stat.S_IMODE(usual.stat().st_mode)
        usual.rmdir()
        for file in beside.iterdir():
            file.chmod(mode & _OF_FILES)
        beside.chmod(mode)


def abandon(beside: Path) -> None:
    """Take away what was written of a checkpoint that failed."""
    shutil.rmtree(beside, ignore_errors=True)


# Ends of hidden folders: one that is being written, and one that another takes the place of.
PARTIAL, REPLACED = ".partial", ".replaced"


def checkpoint_path(path: object) -> Path:
    """A path of a checkpoint, or of a folder of them, from the root; raises UserError where it is invalid."""
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"a checkpoint is a folder; give its path as text, got {path!r}")
    if "\0" in str(path) or not str(path).isprintable():
        raise wrong("a path of a checkpoint", "of printable characters", str(path))
    place = Path(path).expanduser().absolute()
    try:
        place.exists()
    except OSError as error:
        raise UserError(
            f"a checkpoint cannot be at {place}: {error.strerror}; give another path"
        ) from None
    return place


def hidden_beside(path: Path, suffix: str) -> list[Path]:
    """The hidden folders of one checkpoint with this suffix, of no other whose name only begins alike, in order."""
    name = re.compile(rf"{re.escape(f'.{path.name}.')}[^.]+{re.escape(suffix)}")
    folder = path.parent
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in entries if name.fullmatch(each.name))
