"""Checksums of batches and hyperparameters: what they see, and what they cost nothing for."""

from __future__ import annotations

import pytest
import torch

from weft.program.agreement import BatchChecksum, OptionsChecksum


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(24.0).reshape(4, 6),
        torch.arange(24.0).reshape(6, 4).T,
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.ones(5, 5, dtype=torch.bfloat16),
        torch.ones(7, dtype=torch.bool),
        torch.full((3,), float("nan")),
    ],
)
def test_equal_batches_have_equal_checksums(leaf: torch.Tensor) -> None:
    sums = BatchChecksum({"x": tuple(leaf.shape)})
    for step in (0, 5):
        assert sums.of({"x": leaf}, step) == sums.of({"x": leaf.clone()}, step)


@pytest.mark.parametrize("step", [0, 3, 16, 32])
def test_any_other_element_is_seen_in_the_first_steps_and_now_and_then(step: int) -> None:
    leaf = torch.zeros(300, 70)
    sums = BatchChecksum({"x": (300, 70)})
    other = leaf.clone()
    other[299, 69] = 1e-30
    assert sums.of({"x": leaf}, step) != sums.of({"x": other}, step)


def test_another_batch_is_seen_in_every_step() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in [(1000,), (8, 512), (512, 8), (2, 3, 4, 5, 6), (100_000, 1)]:
        sums = BatchChecksum({"x": shape})
        one, other = (torch.randn(shape, generator=generator) for _ in range(2))
        assert sums.of({"x": one}, 5) != sums.of({"x": other}, 5)


def test_hyperparameters() -> None:
    def checksum(update: bool = True, **options: float) -> int:
        parameter = torch.nn.Parameter(torch.ones(2))
        return OptionsChecksum(torch.optim.AdamW([parameter], **options)).of(update)

    assert checksum(lr=0.1) == checksum(lr=0.1)
    assert checksum(lr=0.1) != checksum(lr=0.2)
    assert checksum(weight_decay=0.1) != checksum(weight_decay=0.2)
    assert checksum() != checksum(update=False)


def test_a_schedule_changes_the_checksum() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    sums = OptionsChecksum(optimizer)
    before = sums.of(True)
    assert sums.of(True) == before
    optimizer.param_groups[0]["lr"] = 0.05
    assert sums.of(True) != before
