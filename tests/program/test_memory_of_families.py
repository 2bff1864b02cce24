"""No rank holds more than its plan says: random models of many families under random strategies."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random
from statistics import median

import pytest
import torch

import weft
from families import FAMILIES, Family, optimizer, strategy

SEEDS = range(4)


def held(make: Callable[[Random, int], Family], seed: int) -> list[tuple[int, int, str]]:
    """For each rank of a case the bytes held and planned, and the case in words."""
    random = Random(zlib.crc32(f"{make.__name__} {seed}".encode()))
    torch.manual_seed(seed)
    ranks, rows = random.choice([1, 2, 3, 4]), random.choice([12, 24])
    family = make(random, rows)
    chosen, own = optimizer(random, family.model), strategy(random, family, ranks)
    with weft.local_world(ranks):
        placement = weft.placement("cpu", list(range(ranks)))
        program = weft.compile(
            family.model, family.loss, chosen, family.batch, placement=placement, strategy=own
        )
        program.step(family.batch)
        memory = program.memory()
        program.close()
    text = f"{make.__name__} {seed}: {type(chosen).__name__} on {ranks} ranks, {own}"
    return [(each.measured.peak, each.predicted.peak, text) for each in memory if each.measured]


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_held_is_never_above_planned(make: Callable[[Random, int], Family]) -> None:
    found = [row for seed in SEEDS for row in held(make, seed)]
    assert len(found) >= len(SEEDS)
    above = [
        f"{text}: held {most}, planned {planned}" for most, planned, text in found if most > planned
    ]
    assert above == []
    assert median((planned - most) / planned for most, planned, _ in found) < 0.05
