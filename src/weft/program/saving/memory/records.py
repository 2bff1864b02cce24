"""Records of parts of a snapshot, as JSON: what a process saved, with checksums; all of them are a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from weft.program.saving.extras import Extras
from weft.program.saving.files import file_bytes
from weft.program.saving.manifest import VERSION
from weft.program.saving.memory.mapped import FileForm
from weft.program.saving.save import EXTRA_FILE


@final
@dataclass(frozen=True)
class ExtraPart:
    """The user's own, which the first process saves.

    Attributes:
        content: as JSON.
        parts: name, file, box and checksum of the tensors in it.
        tensors: their shapes and dtypes.
        bytes: of the file that holds them; empty where there are none.
    """

    content: Any = field(default_factory=dict)
    parts: Sequence[Sequence[Any]] = ()
    tensors: Mapping[str, Any] = field(default_factory=dict)
    bytes: bytes = b""

    @property
    def files(self) -> dict[str, int]:
        """Bytes by name."""
        return {EXTRA_FILE: len(self.bytes)} if self.bytes else {}


def extra_part(extras: Extras) -> ExtraPart:
    """Copy what the user gives, but for global tensors."""
    content, found = extras.content, extras.plain
    if not found:
        return ExtraPart(content)
    pieces = {name: (_whole(x), x) for name, x in found.items()}
    made, sums = file_bytes(pieces)
    parts = [[name, EXTRA_FILE, whole, sums[name]] for name, (whole, _) in pieces.items()]
    tensors = {n: [list(x.shape), str(x.dtype).removeprefix("torch.")] for n, x in found.items()}
    return ExtraPart(content, parts, tensors, made)


def _whole(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in tensor.shape)


def fixed_text(
    process: int, processes: int, forms: Mapping[str, FileForm], tensors: Mapping[str, Any]
) -> str:
    """The part that is equal in all records of a process, as JSON.

    Args:
        process, processes: the process, and how many there are.
        forms: of its files.
        tensors: whole shape and dtype of all that is saved, in the first process.
    """
    parts = [
        [name, file, box.whole] for file, form in forms.items() for name, box in form.boxes.items()
    ]
    files = {file: form.bytes for file, form in forms.items()}
    content = {"process": process, "processes": processes, "files": files}
    return json.dumps({**content, "parts": parts, "tensors": tensors})


def record_text(
    fixed: str, step: int, sums: Iterable[int], extra: ExtraPart, about: Any, numbers: Any
) -> str:
    """A record of a process.

    Args:
        fixed: of `fixed_text`.
        step: after which it was taken.
        sums: of the boxes, in the order of the parts.
        extra: the user's own, in the first process.
        about: what is no tensor, in the first process.
        numbers: states of optimizers that are no tensors, by parameter.
    """
    now = {"step": step, "sums": list(sums), "files": extra.files, "parts": extra.parts}
    now |= {"tensors": extra.tensors, "about": about, "numbers": numbers}
    return f'{{"fixed": {fixed}, "now": {json.dumps(now)}}}'


def manifest_text(texts: Iterable[str]) -> str:
    """The manifest of a snapshot, given the records of all its processes, as `read_manifest` reads it.

    Raises:
        ValueError, LookupError, TypeError: a record is damaged.
    """
    extents: dict[str, list[Any]] = {}
    tensors: dict[str, Any] = {}
    about: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for record in map(json.loads, texts):
        fixed, now = record["fixed"], record["now"]
        both = zip(fixed["parts"], now["sums"], strict=True)
        for name, file, whole, checksum in [*([*part, x] for part, x in both), *now["parts"]]:
            extents.setdefault(name, []).append([file, name, whole, checksum])
        tensors |= {**fixed["tensors"], **now["tensors"]}
        about |= now["about"]
        numbers |= now["numbers"]
    content = {
        name: {"shape": shape, "dtype": dtype, "extents": extents.get(name, [])}
        for name, (shape, dtype) in tensors.items()
    }
    about |= {"numbers": numbers, "names": sorted(tensors)}
    return json.dumps({"weft_checkpoint": VERSION, "about": about, "tensors": content})
