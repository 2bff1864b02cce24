"""Parts of a step in line, or side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from search.jobs import decoder, dense, step_of
from weft.planning.stored_step import StoredStep
from weft.search.steps.parts import is_sequential, part_calls
from weft.search.steps.repeated import repeated_blocks


class Stacks(nn.Module):
    """Numbered layers, of which there are as many beside them that are none of these blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = dense(8, 8, 8), dense(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x) + self.other(x)
        return out


class Towers(nn.Module):
    """Layers side by side, and one that joins them; `shared` where each reads what the one before it made, too."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.shared = nn.Linear(8, 4), shared

    def forward(self, x: Tensor) -> Tensor:
        made, total = x, torch.zeros_like(x)
        for tower in self.towers:
            made = tower(made if self.shared else x)
            total = total + made
        out: Tensor = self.head(total)
        return out


def plain() -> StoredStep:
    return step_of(dense(8, 8, 8, 4), 4, 8)


def in_line() -> StoredStep:
    return step_of(Towers(shared=True), 4, 8)


def stacks() -> StoredStep:
    return step_of(Stacks(), 4, 8)


def beside() -> StoredStep:
    return step_of(Towers(shared=False), 4, 8)


@pytest.mark.parametrize(
    ("step", "blocks", "expected"),
    [
        (plain, False, True),
        (lambda: decoder(3), True, True),
        (in_line, False, True),
        (in_line, True, True),
        (beside, False, False),
        (beside, True, False),
        (stacks, True, False),
    ],
)
def test_parts_in_line(step: Callable[[], StoredStep], blocks: bool, expected: bool) -> None:
    made = step()
    found = repeated_blocks(made.modules) if blocks else None
    assert (found is not None) == blocks
    assert is_sequential(made.graph, found) == expected


def test_parts_are_the_calls_that_read_a_parameter() -> None:
    assert len(part_calls(plain().graph)) == 3
