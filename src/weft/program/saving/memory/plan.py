"""The plan of snapshots: which process saves what, in files of which form, and whether there is room for them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import Tensor

from weft.layout.layout import Region
from weft.program.agreement import told
from weft.program.saving.extras import Extras
from weft.program.saving.files import file_bytes
from weft.program.saving.manifest import VERSION
from weft.program.saving.memory.generations import Shelf
from weft.program.saving.memory.hosts import Hosts
from weft.program.saving.memory.mapped import FileForm, form_of
from weft.program.saving.memory.places import TURNS, free_bytes
from weft.program.saving.program_state import ProgramState
from weft.program.saving.save import files_of, tied_names
from weft.program.saving.saved_tensors import Piece, SavedTensor, writers
from weft.units import bytes_text

# Boxes of tensors by file and name, and their values.
Files: TypeAlias = Mapping[str, Mapping[str, tuple[Region, Tensor]]]


@final
@dataclass(frozen=True)
class SnapshotPlan:
    """All that is equal in snapshots of a program that holds the same tensors.

    Attributes:
        kept: by parameter, names of the states that are tensors.
        writers: the pieces that each rank writes, by the name of a tensor and the rank.
        forms: of this process's files.
        tied: further names of tensors.
        sizes: for each process, bytes of its files by name, and a checksum of their headers.
    """

    kept: Mapping[str, list[str]]
    writers: Mapping[tuple[str, int], tuple[Piece, ...]]
    forms: Mapping[str, FileForm]
    fixed: str
    tied: Mapping[str, str]
    sizes: tuple[tuple[Mapping[str, int], int], ...]


def entries_of(state: ProgramState, kept: Mapping[str, list[str]]) -> list[SavedTensor]:
    """The tensors of a program that a snapshot holds."""
    return [*state.variables(), *state.waiting(), *state.states(kept)]


def planned(
    state: ProgramState, shelf: Shelf, used: int, laid: Sequence[SavedTensor]
) -> tuple[SnapshotPlan, str]:
    """Plan what each process saves. Every process must call it.

    Args:
        used: bytes of the files that this process has there already, and which those that are planned replace.
        laid: global tensors among the extras.

    Returns:
        The plan, and why there is no room for it; "" where there is.

    Raises:
        UserError: on all processes, naming a tensor of a dtype that files have not.
    """
    world, line = state.setting.world, shelf.line
    kept, _ = state.kept()
    entries = [*entries_of(state, kept), *laid]
    plan = writers(entries)
    forms: dict[str, FileForm] = {}

    def tell() -> str:
        forms.update(_forms(files_of(entries, plan)))
        sizes = {file: form.bytes for file, form in forms.items()}
        heads = zlib.crc32(b"".join(form.head for form in forms.values()))
        return json.dumps([sizes, heads, used, free_bytes(shelf.folder)])

    every = [json.loads(text) for text in told(world, "the size of a snapshot", tell)]
    every = every[: len(line.hosts.names)]
    tensors = {e.name: [list(e.shape), e.dtype] for e in entries} if 0 in world.ranks else {}
    fixed = fixed_text(line.process, len(line.hosts.names), forms, tensors)
    sizes = tuple((each[0], each[1]) for each in every)
    found = SnapshotPlan(kept, plan, forms, fixed, tied_names(entries), sizes)
    return found, _lacking(line.hosts, every)


def _forms(files: Files) -> dict[str, FileForm]:
    return {
        file: form_of(
            {
                name: (whole, str(x.dtype).removeprefix("torch."))
                for name, (whole, x) in each.items()
            }
        )
        for file, each in files.items()
    }


def _lacking(hosts: Hosts, every: Sequence[Sequence[Any]]) -> str:
    """The reason why there is no room for two generations on some host; "" where there is on all.

    Args:
        hosts: of the processes.
        every: of each process: bytes of its files by name, their checksum, bytes that it has
            taken already, and those that are free.
    """
    for members in hosts.members.values():
        saved = [*members, *(x for process in members for x in hosts.copied_to(process))]
        takes = TURNS * sum(sum(every[process][0].values()) for process in saved)
        free = min(every[process][3] for process in members)
        if takes > free + sum(every[process][2] for process in members):
            return (
                f"no snapshots in memory: two generations take {bytes_text(takes)} on the host of rank {members[0]}, "
                f"which has {bytes_text(free)} free for them; the run goes on with its checkpoints on disk"
            )
    return ""


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
