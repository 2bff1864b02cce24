"""One snapshot on its way: a thread sums it, sends it to the buddy, and lets it count once all have theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.program.saving.extras import extra_file
from weft.program.saving.files import summing
from weft.program.saving.memory.hosts import BuddyLine
from weft.program.saving.memory.mapped import FormedFile, MappedFile, in_pieces
from weft.program.saving.memory.places import RECORD, UNSURE


@final
@dataclass(frozen=True)
class HeldFiles:
    """The files of one generation that a process writes on its host, mapped.

    Attributes:
        place: of its own.
        own: by name.
        copies: by process: the folder, and the files by name, of copies of what others save.
    """

    place: Path
    own: Mapping[str, FormedFile]
    copies: Mapping[int, tuple[Path, Mapping[str, MappedFile]]] = field(default_factory=dict)

    @property
    def places(self) -> tuple[Path, ...]:
        """All folders."""
        return (self.place, *(place for place, _ in self.copies.values()))

    @property
    def bytes(self) -> int:
        """Of all files."""
        copies = (file for _, files in self.copies.values() for file in files.values())
        files = [*(file.mapped for file in self.own.values()), *copies]
        return sum(file.bytes.numel() for file in files)


@final
class TakenSnapshot:
    """A snapshot whose values are copied, and which is still to be summed, sent and declared whole.

    Args:
        files: with the values.
        record: gives the record, given the checksums.
        extra: the bytes of the extras' file; empty where there is none.
    """

    def __init__(
        self,
        files: HeldFiles,
        record: Callable[[Sequence[int]], str],
        extra: bytes,
        line: BuddyLine,
    ) -> None:
        self._files, self._record, self._extra, self._line = files, record, extra, line
        self._why = ""
        self._error: BaseException | None = None
        # No daemon: a process that ends has done its part for the others.
        self._thread = threading.Thread(target=self._run, name="weft snapshot")
        self._thread.start()

    def wait(self) -> str:
        """Wait until it counts; gives why it does not, "" where it does: the same on all processes.

        Raises:
            RankFailure: another process has gone.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._why

    def _run(self) -> None:
        try:
            self._why = self._taken()
        except BaseException as error:
            self._error = error

    def _taken(self) -> str:
        tensors = [each for file in self._files.own.values() for each in file.tensors]
        sums = summing(tensors)()
        record, process = self._record(sums).encode(), self._line.process
        texts = {self._files.place: {extra_file(process): self._extra, UNSURE: record}}
        texts |= self._swapped(record, self._extra)
        why = self._line.failed(_written(texts))
        for place in texts:
            if why:
                (place / UNSURE).unlink(missing_ok=True)
            else:
                (place / UNSURE).replace(place / RECORD)
        return why

    def _swapped(self, record: bytes, extra: bytes) -> dict[Path, dict[str, bytes]]:
        """Give the buddy its copy; the records and extras of those whose buddy this process is, by folder."""
        line, copies = self._line, self._files.copies
        buddy = line.hosts.buddies.get(line.process)
        lengths = {process: torch.zeros(2, dtype=torch.int64) for process in copies}
        own = torch.tensor([len(record), len(extra)])
        to = [] if buddy is None else [buddy]
        line.swap({each: [own] for each in to}, {process: [x] for process, x in lengths.items()})
        texts = {
            process: [torch.zeros(int(length), dtype=torch.uint8) for length in each]
            for process, each in lengths.items()
        }
        mine = [_tensor(record), _tensor(extra)]
        mine += [
            piece for file in self._files.own.values() for piece in in_pieces(file.mapped.bytes)
        ]
        coming = {
            process: [*texts[process], *(x for f in files.values() for x in in_pieces(f.bytes))]
            for process, (_, files) in copies.items()
        }
        line.swap(dict.fromkeys(to, mine), coming)
        return {
            place: {
                file: text.numpy().tobytes()
                for file, text in zip((UNSURE, extra_file(process)), texts[process], strict=True)
            }
            for process, (place, _) in copies.items()
        }


def _tensor(text: bytes) -> Tensor:
    # Of no bytes there is no buffer.
    return torch.frombuffer(bytearray(text or b"-"), dtype=torch.uint8)[: len(text)]


def _written(texts: Mapping[Path, Mapping[str, bytes]]) -> str:
    """Write extras and records that do not count yet; why that did not do, "" where it did."""
    for place, files in texts.items():
        try:
            for file, text in files.items():
                if text:
                    (place / file).write_bytes(text)
        except OSError as error:
            return f"cannot write into {place}: {error.strerror}"
    return ""
