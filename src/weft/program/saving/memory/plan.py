"""The plan of snapshots: which process saves what, in files of which form, and whether there is room for them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import Tensor

from weft.layout.region import Region
from weft.program.everyone import told
from weft.program.saving.memory.hosts import Hosts
from weft.program.saving.memory.mapped import FileForm, form_of
from weft.program.saving.memory.places import TURNS, free_bytes
from weft.program.saving.memory.records import fixed_text
from weft.program.saving.memory.shelf import Shelf
from weft.program.saving.pieces import Piece
from weft.program.saving.program_state import ProgramState
from weft.program.saving.save import files_of, tied_names
from weft.program.saving.saved_tensors import SavedTensor, writers
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
        fixed: of `fixed_text`.
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
        state: of the program.
        shelf: where snapshots lie.
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
