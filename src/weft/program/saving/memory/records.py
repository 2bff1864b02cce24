"""Records of parts of a snapshot, as JSON: what a process saved, with checksums; all of them are a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from weft.program.saving.extras import Extras
from weft.program.saving.files import file_bytes
from weft.program.saving.manifest import VERSION
from weft.program.saving.memory.mapped import FileForm


def extra_part(extras: Extras) -> tuple[dict[str, Any], bytes]:
    """The user's own tensors, as a record of this process has them, and the bytes of their file, if there are any."""
    made, sums = file_bytes(extras.pieces) if extras.pieces else (b"", {})
    parts = [[name, extras.file, whole, sums[name]] for name, (whole, _) in extras.pieces.items()]
    files = {extras.file: len(made)} if made else {}
    return {"files": files, "parts": parts, "tensors": extras.shapes}, made


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
    fixed: str, step: int, sums: Iterable[int], extra: Mapping[str, Any], about: Any, numbers: Any
) -> str:
    """A record of a process.

    Args:
        fixed: of `fixed_text`.
        step: after which it was taken.
        sums: of the boxes, in the order of the parts.
        extra: of `extra_part`.
        about: what is no tensor, in the first process.
        numbers: states of optimizers that are no tensors, by parameter.
    """
    now = {"step": step, "sums": list(sums), **extra, "about": about, "numbers": numbers}
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
