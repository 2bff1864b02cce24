"""Data for examples that needs no download: scikit-learn's handwritten digits, and the text of Python's own library."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import interpolate

Batch = dict[str, Tensor]


@cache
def digits(side: int = 8) -> tuple[Batch, Batch]:
    """1437 to train on and 360 to test on: "x" float32 [n, 1, side, side] in [0, 1], "y" the digits int64 [n]."""
    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, classes, test_size=360, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)

    def images(x: Tensor) -> Tensor:
        small = x.float().reshape(-1, 1, 8, 8)
        return small if side == 8 else interpolate(small, (side, side), mode="bilinear")

    return {"x": images(train_x), "y": train_y}, {"x": images(test_x), "y": test_y}


def digit_batches(steps: int, size: int = 64, side: int = 8) -> list[Batch]:
    """Random batches of the digits to train on; all ranks draw the same."""
    train, _ = digits(side)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(train["y"]), (steps, size), generator=generator)
    return [{name: values[chosen] for name, values in train.items()} for chosen in rows]


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
