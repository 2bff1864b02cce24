"""A block of a random program: source text for one module, and the shape that it makes.

Shapes are those of one sample: (d,) for rows, (t, d) for tokens, (c, h, w) for images. A block reads
`x` of [n, *shape] and returns [n, *its shape]; n, the size of the batch, it does not know.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
KINDS = {"rows": 1, "tokens": 2, "images": 3}
SIZES = (1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 12, 16)
ACTIVATIONS = (
    *("torch.relu({})", "F.gelu({})", "F.gelu({}, approximate='tanh')", "F.silu({})"),
    *("torch.tanh({})", "torch.sigmoid({})", "F.softplus({})", "F.elu({})", "F.mish({})"),
    *("F.leaky_relu({}, 0.2)", "F.hardswish({})", "F.relu6({})", "F.logsigmoid({})", "{}"),
    *("F.softsign({})", "torch.sin({})", "torch.relu({}).square()", "F.celu({})", "F.selu({})"),
)


@dataclass(frozen=True)
class Block:
    """One module as text.

    Attributes:
        setup: lines of `__init__`.
        forward: lines of `forward(self, x)`; the last returns the result, or it and a loss.
        shape: what is made of one sample.
        auxiliary: whether `forward` returns a loss beside its result.
    """

    setup: str
    forward: str
    shape: tuple[int, ...]
    auxiliary: bool = False


@dataclass
class Draw:
    """What a block draws its choices from.

    Attributes:
        rng: of this block alone.
        shape: of a sample that comes in.
        dropout: the probability of dropout, 0 in programs without random ops.
    """

    rng: random.Random
    shape: tuple[int, ...]
    dropout: float = 0.0

    @property
    def last(self) -> int:
        return self.shape[-1]

    def pick(self, *options: T) -> T:
        return self.rng.choice(options)

    def flag(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def size(self) -> int:
        """Some number of features, odd or even."""
        return self.rng.choice(SIZES)

    def act(self, x: str) -> str:
        """An activation of the expression `x`."""
        return self.rng.choice(ACTIVATIONS).format(x)

    def with_last(self, size: int) -> tuple[int, ...]:
        return (*self.shape[:-1], size)

    def divisor(self, number: int) -> int:
        """Some number that divides `number`."""
        return self.rng.choice([each for each in range(1, number + 1) if number % each == 0])


Writer = Callable[[Draw], Block]


@dataclass(frozen=True)
class Kind:
    """A way to write blocks.

    Attributes:
        write: draws one.
        kinds: of what it takes: "rows", "tokens", "images".
        weight: how often it is drawn.
        least: sizes that a sample has at least, from the last dimension on.
    """

    write: Writer
    kinds: tuple[str, ...]
    weight: float
    least: tuple[int, ...] = field(default=())

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether samples of this shape fit."""
        fits = len(shape) in [KINDS[kind] for kind in self.kinds]
        return fits and all(a >= b for a, b in zip(shape[::-1], self.least, strict=False))


_blocks: dict[str, Kind] = {}
BLOCKS: Mapping[str, Kind] = _blocks


def block(
    kinds: str = "rows tokens images", weight: float = 1.0, least: tuple[int, ...] = ()
) -> Callable[[Writer], Writer]:
    """Register a function that writes blocks, under its own name."""

    def register(write: Writer) -> Writer:
        _blocks[write.__name__] = Kind(write, tuple(kinds.split()), weight, least)
        return write

    return register


def fitting(shape: tuple[int, ...]) -> dict[str, float]:
    """The names of blocks that take samples of a shape, with their weights."""
    return {name: kind.weight for name, kind in _blocks.items() if kind.takes(shape)}
