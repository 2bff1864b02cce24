"""A sample as a user's program: compiled, planned, and run by actors on four ranks, threads of this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import weft
from tools.opinfo.reference import Backward, values_and_gradients
from tools.opinfo.samples import Case
from weft.layout import SBP, Broadcast, Split

RANKS = 4
GRIDS: tuple[Any, ...] = ([0, 1, 2, 3], [[0, 1], [2, 3]])
Layouts = Mapping[str, tuple[SBP, ...]]


def programs(
    case: Case, seeds: Sequence[torch.Tensor]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What programs on `RANKS` ranks make of a sample, in two layouts: in words which, and results by name.

    On a line of ranks every input is split along its first dimension; on a square each along two that are drawn.
    Called within a world of so many ranks.
    """
    batch = {f"x{i}": x for i, x in enumerate((*case.tensors, *seeds))}
    for grid, layouts in zip(GRIDS, layouts_of(batch, case.key), strict=True):
        yield f"{grid} {layouts}", run(case, batch, grid, layouts)


def alone(case: Case, seeds: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a program on one rank makes of it."""
    batch = {f"x{i}": x for i, x in enumerate((*case.tensors, *seeds))}
    return run(case, batch, [0], {})


def layouts_of(batch: Mapping[str, torch.Tensor], seed: str) -> tuple[Layouts, Layouts]:
    """Every input split along its first dimension; and along one or two that are drawn from `seed`."""
    draw = random.Random(seed)
    first: Layouts = {key: (Split(0),) for key, x in batch.items() if x.dim()}
    drawn = {
        key: tuple(
            Split(draw.randrange(x.dim())) if draw.random() < 0.7 else Broadcast() for _ in range(2)
        )
        for key, x in batch.items()
        if x.dim()
    }
    return first, drawn


def run(
    case: Case, batch: Mapping[str, torch.Tensor], grid: Any, layouts: Layouts
) -> dict[str, torch.Tensor]:
    """Compile the sample's values and gradients as a step without an optimizer, run it, and close it."""
    count = len(case.tensors)

    def step(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, Any]:
        tensors = [given[f"x{i}"] for i in range(len(given))]
        return values_and_gradients(case, tensors[:count], Backward(given=tensors[count:]))

    program = weft.compile(
        torch.nn.Module(),
        step,
        None,
        dict(batch),
        placement=weft.placement("cpu", grid),
        strategy=weft.Strategy(batch=dict(layouts)),
        seed=0,
    )
    try:
        return {name: torch.as_tensor(x) for name, x in program.step(dict(batch)).items()}
    finally:
        program.close()
