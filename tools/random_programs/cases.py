"""A case: one random program under one random strategy, drawn from its seed alone, and simpler ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from tools.random_programs.blocks import BLOCKS, Block, Draw, fitting
from tools.random_programs.changes import CHANGES
from tools.random_programs.losses import LOSSES
from tools.random_programs.optimizers import OPTIMIZERS

LARGEST = 600  # elements of a sample between blocks
GRIDS = (
    *((2,), (2,), (3,), (3,), (4,), (4,), (5,), (6,), (7,), (8,)),
    *((2, 2), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)),
)
BASES = {
    "data": 3.0,
    "free": 2.0,
    "tensor": 2.5,
    "hybrid": 2.0,
    "random": 3.0,
    "random data": 2.0,
    "expert": 1.5,
    "context": 1.0,
}


@dataclass(frozen=True)
class Step:
    """One step of a case.

    Attributes:
        samples: of its batch.
        update: whether parameters are updated.
        rate: by what learning rates are multiplied before.
        change: what else is done before, by name (`CHANGES`), or nothing.
    """

    samples: int
    update: bool = True
    rate: float = 1.0
    change: str = ""


@dataclass(frozen=True)
class Case:
    """What a program and its strategy are made of.

    Attributes:
        seed: of all that is drawn further.
        start: what a batch holds: "rows", "tokens", "ids" or "images".
        shape: of a sample, behind the embedding where there is one.
        blocks: numbers and names; a block that does not fit what comes is passed over.
        tied: whether the head is the embedding's weight.
        loss, optimizer: by name.
        steps: in order.
        grid: shape of the placement.
        base: by which layouts are chosen.
        features: what the strategy asks for beside layouts.
        dtype: of parameters.
        dropout: its probability; above 0 weft on one rank is the reference.
    """

    seed: int
    start: str
    shape: tuple[int, ...]
    blocks: tuple[tuple[int, str], ...]
    tied: bool
    loss: str
    optimizer: str
    steps: tuple[Step, ...]
    grid: tuple[int, ...]
    base: str
    features: tuple[str, ...]
    dtype: str = "float64"
    dropout: float = 0.0

    @property
    def ranks(self) -> int:
        return prod(self.grid)

    def rng(self, *what: object) -> random.Random:
        """A generator for one choice, that no other choice disturbs."""
        return random.Random("/".join(map(str, (self.seed, *what))))

    def written(self) -> Iterator[tuple[str, Block]]:
        """The blocks that fit, with the names of their modules."""
        shape = self.shape
        for number, name in self.blocks:
            if BLOCKS[name].takes(shape):
                made = BLOCKS[name].write(Draw(self.rng("block", number), shape, self.dropout))
                if prod(made.shape) <= LARGEST:
                    shape = made.shape
                    yield f"b{number}", made

    def made(self) -> tuple[int, ...]:
        """The shape of a sample behind the blocks."""
        return next((b.shape for _, b in reversed([*self.written()])), self.shape)


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"case {seed}")
    start = rng.choice(["rows", "rows", "tokens", "tokens", "ids", "ids", "images"])
    shape = _shape(rng, start)
    case = Case(
        seed=seed,
        start=start,
        shape=shape,
        blocks=(),
        tied=start == "ids" and rng.random() < 0.4,
        loss=rng.choice(list(LOSSES)),
        optimizer=rng.choices(list(OPTIMIZERS), [one.weight for one in OPTIMIZERS.values()])[0],
        steps=(),
        grid=rng.choice(GRIDS),
        base=rng.choices(list(BASES), list(BASES.values()))[0],
        features=_features(rng),
        dtype="float32" if rng.random() < 0.12 else "float64",
        dropout=rng.choice([0.1, 0.3, 0.5]) if rng.random() < 0.12 else 0.0,
    )
    for number in range(rng.choice([1, 1, 2, 2, 3, 3, 4, 5, 6])):
        weights = fitting(case.made())
        name = rng.choices(list(weights), list(weights.values()))[0]
        case = replace(case, blocks=(*case.blocks, (number, name)))
    if case.base == "expert" and start in ("rows", "tokens", "ids"):
        name = rng.choice(["sorted_experts", "sorted_experts", "dense_experts"])
        case = replace(case, blocks=((99, name), *case.blocks))
    return _fitting(replace(case, steps=_steps(rng, case)))


def _shape(rng: random.Random, start: str) -> tuple[int, ...]:
    width = rng.choice([2, 3, 4, 5, 6, 7, 8, 8, 12, 16])
    if start == "rows":
        return (width,)
    if start == "images":
        return (
            rng.choice([1, 2, 3, 4]),
            rng.choice([3, 4, 5, 6, 8, 9]),
            rng.choice([3, 4, 5, 6, 8]),
        )
    return (rng.choice([1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 11]), width)


def _features(rng: random.Random) -> tuple[str, ...]:
    chances = {
        "zero": 0.3,
        "micro": 0.2,
        "recompute": 0.15,
        "offload": 0.06,
        "stages": 0.15,
        "own stages": 0.08,
        "clip": 0.15,
        "activations": 0.1,
        "evaluation": 0.12,
        "bf16": 0.05,
        "metrics": 0.1,
    }
    return tuple(name for name, chance in chances.items() if rng.random() < chance)


def _steps(rng: random.Random, case: Case) -> tuple[Step, ...]:
    samples = rng.choice([1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 8, 9, 12])
    if "micro" in case.features:
        samples = rng.choice([2, 4, 6, 8, 8, 12])
    found: list[Step] = []
    for number in range(rng.choice([2, 3, 3, 4])):
        other = number and rng.random() < 0.08
        found.append(
            Step(
                samples + (2 if other else 0),
                update=rng.random() > 0.1 or "clip" in case.features,
                rate=rng.choice([0.5, 2.0]) if rng.random() < 0.1 else 1.0,
                change=_change(rng, found),
            )
        )
    return (*found[:-1], replace(found[-1], update=True))


def _change(rng: random.Random, before: list[Step]) -> str:
    change = rng.choice(CHANGES) if rng.random() < 0.12 else ""
    # Held gradients stay on the model, but the next program clears what stood when it was compiled.
    moves = before and before[-1].update
    return "" if change == "moved" and not moves else change


def _fitting(case: Case) -> Case:
    """Without what contradicts itself."""
    features = list(case.features)
    text = "".join(block.setup for _, block in case.written())
    if "micro" in features and ("BatchNorm" in text or "complex128" in text):
        features.remove("micro")  # statistics of micro-batches are meant to differ
    if "BatchNorm" in text:  # of one row there is no variance
        steps = tuple(replace(step, samples=max(step.samples, 2)) for step in case.steps)
        case = replace(case, steps=steps)
    if "stages" in features and "own stages" in features:
        features.remove("stages")
    if "bf16" in features:
        case = replace(case, dtype="float32")
    if "bf16" in features and ("complex128" in text or "self.gate" in text or case.dropout):
        features.remove("bf16")  # autocast leaves some ops with two dtypes, which PyTorch refuses
    if "own stages" in features and case.base in ("hybrid", "context", "expert"):
        features.remove("own stages")
    grid = case.grid
    if case.base == "hybrid" and len(grid) != 2:
        grid = case.rng("grid").choice([each for each in GRIDS if len(each) == 2])
    if case.base in ("tensor", "expert") or "own stages" in features:
        grid = (prod(grid),)
    return replace(case, features=tuple(features), grid=grid)


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest things first."""
    for at in range(len(case.blocks)):
        yield replace(case, blocks=case.blocks[:at] + case.blocks[at + 1 :])
    for name in case.features:
        yield replace(case, features=tuple(each for each in case.features if each != name))
    if len(case.steps) > 1:
        yield replace(case, steps=case.steps[-1:])
        yield replace(case, steps=case.steps[:-1])
    yield from (replace(case, loss="squares"), replace(case, optimizer="SGD"))
    yield replace(
        case, steps=tuple(replace(step, rate=1.0, update=True, change="") for step in case.steps)
    )
    yield from (replace(case, tied=False), replace(case, dropout=0.0))
    for grid in ((2,), (3,), (2, 2)):
        if prod(grid) < case.ranks and not (case.base == "hybrid" and len(grid) == 1):
            yield replace(case, grid=grid)
    if case.base not in ("data", "free"):
        yield from (replace(case, base="data"), replace(case, base="free"))
