"""A step with fewer of its blocks is the step of a smaller model."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import pytest
import torch
from torch import Tensor, nn

import weft
from search.jobs import decoder, layers, step_of
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.search.steps.repeated import with_fewer_blocks


@pytest.mark.parametrize("count", [3, 4])
def test_it_takes_as_long_as_that_of_a_model_with_as_few(count: int) -> None:
    fewer = with_fewer_blocks(decoder(6), count)
    assert fewer is not None
    one, other = (
        weft.simulate(step, weft.data_parallel(), "h100x2") for step in (fewer, decoder(count))
    )
    assert (one.step_seconds, one.flops) == (other.step_seconds, other.flops)
    assert one.memory == other.memory


def test_the_first_ones_and_the_last_two_stay() -> None:
    fewer = with_fewer_blocks(decoder(6), 4)
    assert fewer is not None
    gone = {"blocks.2", "blocks.3"}
    assert {path for path in decoder(6).modules if path.startswith(tuple(gone))} == set(
        decoder(6).modules
    ) - set(fewer.modules)
    kept = held(decoder(6).graph) - held(fewer.graph)
    assert {".".join(key.split(".")[:2]) for key in kept} == gone


def held(graph: LogicalGraph) -> set[str]:
    """The keys of what a step holds."""
    return {node.key for node in graph.of_kind(Input) if prod(node.value.shape)}


def test_there_are_three_at_least_and_fewer_than_before() -> None:
    assert with_fewer_blocks(decoder(6), 2) is None
    assert with_fewer_blocks(decoder(6), 6) is None
    assert with_fewer_blocks(layers(), 3) is None


class Block(nn.Module):
    """A layer of eight features, and what follows it.

    Args:
        after: what follows.
        notes: true where it adds the mean of what it makes to a note.
    """

    def __init__(self, after: nn.Module, notes: bool) -> None:
        super().__init__()
        self.layer, self.after, self.notes = nn.Linear(8, 8), after, notes

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """[rows, 8] to the same."""
        made: Tensor = self.after(self.layer(x))
        if self.notes:
            seen.add_(made.detach().mean())
        return made


class Model(nn.Module):
    """Six blocks, and a head of three classes.

    Args:
        other: the number of a block that differs.
        read: the number of one that the head reads too.
        notes: the numbers of those that note a mean.
    """

    seen: Tensor

    def __init__(self, other: int = -1, read: int = -1, notes: Collection[int] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(nn.Tanh() if number == other else nn.ReLU(), number in notes)
            for number in range(6)
        )
        self.head, self.read = nn.Linear(8, 3), read
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 3]."""
        kept = torch.zeros(())
        for number, block in enumerate(self.blocks):
            x = block(x, self.seen)
            kept = x if number == self.read else kept
        out: Tensor = self.head(x + kept)
        return out


@pytest.mark.parametrize(
    ("model", "some"),
    [
        (Model(), True),
        (Model(read=5), True),
        (Model(read=2), False),
        (Model(other=3), False),
        (Model(notes=range(6)), True),
        # The note that an update reads is that of a block that is left out.
        (Model(notes=(0, 3)), False),
    ],
    ids=["alike", "the last is read", "one is read", "one differs", "all note", "some note"],
)
def test_blocks_stay_that_differ_or_are_read_elsewhere(model: Model, some: bool) -> None:
    """Of three that stay they are the first and the last two."""
    fewer = with_fewer_blocks(step_of(model, 4, 8), 3)
    assert (fewer is not None) == some
