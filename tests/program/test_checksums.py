"""Checksums of batches and hyperparameters: what they see, and what they cost nothing for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.program.checksums import BatchChecksums, OptionsChecksum, batch_checksums
from weft.program.data import feed


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
    for step in (0, 5):
        assert batch_checksums({"x": leaf}, {}, step) == batch_checksums(
            {"x": leaf.clone()}, {}, step
        )


@pytest.mark.parametrize("step", [0, 3, 16, 32])
def test_any_other_element_is_seen_in_the_first_steps_and_now_and_then(step: int) -> None:
    leaf = torch.zeros(300, 70)
    other = leaf.clone()
    other[299, 69] = 1e-30
    assert batch_checksums({"x": leaf}, {}, step) != batch_checksums({"x": other}, {}, step)


def test_the_first_steps_are_those_after_a_checkpoint_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def noted(leaves: Any, given: Any, step: int, *more: Any) -> BatchChecksums:
        seen.append(step)
        return batch_checksums(leaves, given, step, *more)

    monkeypatch.setattr(feed, "batch_checksums", noted)
    model, x = torch.nn.Linear(2, 1), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.local_world(2):
        ranks = weft.placement("cpu", [0, 1])
        program = weft.compile(model, mean, optimizer, x, placement=ranks)
        # Of ranks in one process no batches are compared.
        program._core.variants.current.feeder._compared = True
        for _ in range(3):
            program.step(x)
        program.save(tmp_path / "saved")
        program.load(tmp_path / "saved")
        program.step(x)
        assert program.steps == 4
        program.close()
    assert seen == [0, 1, 2, 0]


def mean(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).mean()
    return loss


def test_another_batch_is_seen_in_every_step() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in [(1000,), (8, 512), (512, 8), (2, 3, 4, 5, 6), (100_000, 1)]:
        one, other = (torch.randn(shape, generator=generator) for _ in range(2))
        assert batch_checksums({"x": one}, {}, 5) != batch_checksums({"x": other}, {}, 5)


class OnDevice:
    """In place of a tensor on a GPU."""

    def __init__(self, value: float) -> None:
        self.held: Any = torch.full((4, 3), value)
        self.device, self.nbytes, self.shape = torch.device("cuda"), 48, self.held.shape

    def __getitem__(self, places: Any) -> Any:
        return self.held[places]


@pytest.mark.parametrize(("step", "seen"), [(0, True), (3, True), (5, False), (16, True)])
def test_a_batch_on_a_device_is_looked_at_now_and_then(step: int, seen: bool) -> None:
    leaves: list[Any] = [OnDevice(1.0), OnDevice(2.0)]
    found = [batch_checksums({"x": leaf}, {}, step) for leaf in leaves]
    assert (found[0] != found[1]) is seen


def test_parts_count_among_ranks_that_have_the_same() -> None:
    layout = weft.placement("cpu", [[0, 1], [2, 3]])
    with weft.local_world(4):

        def sums(value: float) -> BatchChecksums:
            rows = weft.full((4, 2), value, placement=layout, sbp=[weft.split(0), weft.broadcast])
            return batch_checksums({}, {"x": rows}, 0)

        for ranks, same in [((0, 1), False), ((2, 3), False), ((0, 2), True), ((0, 1, 2, 3), True)]:
            assert (sums(1.0).alike(ranks) == sums(2.0).alike(ranks)) is same


def test_hyperparameters() -> None:
    def checksum(update: bool = True, **options: float) -> int:
        parameter = torch.nn.Parameter(torch.ones(2))
        return OptionsChecksum(torch.optim.AdamW([parameter], **options)).of(update)

    assert checksum(lr=0.1) == checksum(lr=0.1)
    assert checksum(lr=0.1) != checksum(lr=0.2)
    assert checksum(weight_decay=0.1) != checksum(weight_decay=0.2)
    assert checksum() != checksum(update=False)


def test_what_is_changed_in_place_changes_the_checksum() -> None:
    tensors = torch.tensor(0.9), torch.tensor(0.99)
    for betas in ([0.9, 0.99], tensors):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1))
        optimizer.param_groups[0]["betas"] = betas
        sums = OptionsChecksum(optimizer)
        before = sums.of(True)
        assert sums.of(True) == before
        if isinstance(betas, list):
            betas[1] = 0.5
        else:
            betas[1].fill_(0.5)
        assert sums.of(True) != before


def test_a_schedule_changes_the_checksum() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    sums = OptionsChecksum(optimizer)
    before = sums.of(True)
    assert sums.of(True) == before
    optimizer.param_groups[0]["lr"] = 0.05
    assert sums.of(True) != before
