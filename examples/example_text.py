"""The text of Python's own library, byte by byte: data for examples that needs no download."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

Batch = dict[str, Tensor]


@cache
def library_text(pattern: str = "*.py") -> Tensor:
    """The bytes of all files of Python's standard library that a pattern names, uint8 [n]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def windows(text: Tensor, count: int, length: int, seed: int = 0) -> Tensor:
    """Random windows of a text, int64 [count, length]; all ranks draw the same."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def text_batches(
    steps: int, size: int = 16, length: int = 64, text: Tensor | None = None
) -> list[Batch]:
    """Batches of windows: "x" the bytes, "y" the bytes that follow, both int64 [size, length]."""
    text = library_text() if text is None else text
    drawn = windows(text, steps * size, length + 1).split(size)
    return [{"x": each[:, :-1], "y": each[:, 1:]} for each in drawn]
