"""Exchanges that are read off a step: each sum once, wherever a plan may add it up, and each weight's gradient once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import weft
from search.jobs import decoder, loss
from weft.planning.stored_step import StoredStep
from weft.search.steps.exchanged import gradients, sums
from weft.search.steps.linears import linears_of

ROWS, WIDTH = 16, 8
# Bytes of a norm's weight: gradients behind it may be added up there.
NORM = 4 * WIDTH


class Block(nn.Module):
    """Two ways side by side that read the same: their parts may be added up together."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one, self.two = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 64)
        self.one_back, self.two_back = nn.Linear(32, WIDTH), nn.Linear(64, WIDTH)
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        y = self.norm(x)
        x = x + self.one_back(torch.relu(self.one(y)))
        y = y if self.beside else self.norm(x)
        out: Tensor = x + self.two_back(torch.relu(self.two(y)))
        return out


class Model(nn.Module):
    """Blocks, and a head of three classes."""

    def __init__(self, beside: bool, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.blocks = nn.ModuleList([Block(beside) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to [rows, 3]."""
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(torch.tanh(x))
        return out


def step(model: nn.Module, rows: int = ROWS) -> StoredStep:
    batch = {"x": torch.zeros(ROWS, WIDTH), "y": torch.zeros(rows, dtype=torch.int64)}
    trained = [each for each in model.parameters() if each.requires_grad]
    return weft.Job(model, loss, torch.optim.SGD(trained), batch).stored()


def sizes(stored: StoredStep) -> list[tuple[int, int]]:
    found = sums(stored.graph, linears_of(stored).cuts)
    return sorted((each.size, each.weights) for each in found)


def test_ways_one_after_another_are_added_up_each() -> None:
    size = 4 * ROWS * WIDTH
    one, two = (4 * WIDTH * width for width in (32, 64))
    # Forward of both ways of two blocks, each beside its weight; backward beside that and the one it comes back to, of
    # which the smaller one counts. Before the first there is a norm alone.
    expected = [(size, one), (size, two)] * 2 + [(NORM, one)] + [(size, one)] * 3
    assert sizes(step(Model(beside=False, norm=True))) == sorted(expected)


def test_ways_side_by_side_may_be_added_up_together() -> None:
    size = 4 * ROWS * WIDTH
    forward, backward = (size, 4 * WIDTH * 32), (size, 4 * WIDTH * (32 + 64))
    first = NORM, 4 * WIDTH * (32 + 64)
    # What the second block reads is of both layers by rows: with the weights of one gathered, it need not be added up.
    second = size, 4 * WIDTH * 64
    assert sizes(step(Model(beside=True, norm=True))) == sorted([forward, forward, first, second])
    assert backward not in sizes(step(Model(beside=True, norm=True)))


class Apart(nn.Module):
    """Ways side by side, each behind a norm of its own, of what a layer by rows made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(32, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to [rows, 3]."""
        x = torch.tanh(self.down(torch.relu(self.up(x))))
        parts = zip(self.norms, self.ups, self.downs, strict=True)
        made = [down(torch.relu(up(norm(x)))) for norm, up, down in parts]
        return torch.tanh(made[0] + made[1])


def test_ways_that_meet_are_added_up_once() -> None:
    """Behind a norm each, parts of the gradient of what both read; the second may be added up at its norm's weight."""
    cuts = {"up": "columns", "ups.0": "columns", "ups.1": "columns"}
    cuts |= {"down": "rows", "downs.0": "rows", "downs.1": "rows"}
    found = [each.size for each in sums(step(Apart()).graph, cuts)]
    # The results of both layers by rows at the end are added up together.
    assert sorted(found) == sorted([4 * ROWS * WIDTH, 4 * ROWS * 3, 4 * ROWS * WIDTH, NORM])


def test_nobody_needs_the_gradient_of_the_batch() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    layers.extend([nn.ReLU(), nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4)])
    forward = [(4 * ROWS * WIDTH, 4 * 32 * WIDTH), (4 * ROWS * 4, 4 * 32 * 4)]
    backward = [(4 * ROWS * WIDTH, 4 * WIDTH * 32)]
    assert sizes(step(layers)) == sorted(forward + backward)


class Pooled(nn.Module):
    """Layers in turn, of whose last sum one row is read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to [1, 3]."""
        made = self.down(torch.relu(self.up(x)))
        out: Tensor = self.head(torch.tanh(made.mean(0, keepdim=True)))
        return out


def test_a_sum_is_added_up_where_it_is_smallest() -> None:
    # The head is cut by columns: so is the gradient of what it reads.
    expected = [(4 * WIDTH, 4 * 32 * WIDTH), (4 * WIDTH, 4 * 3 * WIDTH)]
    assert sizes(step(Pooled(), rows=1)) == sorted(expected)


def test_what_is_linear_passes_parts_on() -> None:
    """A whole layer behind one cut by rows: parts of its few results may be added up."""
    layers = nn.Sequential(
        nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 3)
    )
    cuts = {"0": "columns", "2": "rows"}
    (found,) = sums(step(layers).graph, cuts)
    assert found.size == 4 * ROWS * 3


def test_what_is_frozen_needs_no_gradient() -> None:
    model = Model(beside=False, norm=True)
    for name, each in model.named_parameters():
        each.requires_grad_(name.startswith(("blocks.1.", "head")))
    stored = step(model)
    assert {each.key.split(".")[1] for each in gradients(stored.graph)} == {"1", "weight"}
    # Forward sums of both blocks; gradients of what only the second's layers read, but for its first norm's.
    size = 4 * ROWS * WIDTH
    one, two = (4 * WIDTH * width for width in (32, 64))
    expected = [(size, one), (size, two)] * 2 + [(NORM, one), (size, one)]
    assert sizes(stored) == sorted(expected)
    # Nothing comes back through the first block.
    assert [each.once for each in sums(stored.graph, linears_of(stored).cuts)].count(True) == 2


def test_a_shared_weight_has_one_gradient() -> None:
    one = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(one, nn.ReLU(), one, nn.ReLU(), nn.Linear(WIDTH, 4))
    found = {each.key: each for each in gradients(step(model).graph)}
    assert found.keys() == {"0.weight", "4.weight"}
    assert found["0.weight"].elements == WIDTH * WIDTH
    assert found["0.weight"].around == 2 * 2 * 4 * ROWS * WIDTH
    assert found["4.weight"].around == 4 * ROWS * (WIDTH + 4)


def test_a_convolution_has_a_gradient() -> None:
    model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 5, 1), nn.Flatten())
    (found,) = gradients(step(model).graph)
    assert (found.key, found.elements, found.around) == ("1.weight", 10, 4 * ROWS * (8 + 20))


def test_a_decoder_adds_up_twice_a_block_each_way() -> None:
    stored = decoder()
    assert len(sums(stored.graph, linears_of(stored).cuts)) == 3 * 4
    assert sums(stored.graph, {}) == ()
