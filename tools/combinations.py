"""GPT and ResNet under data × tensor × pipeline × ZeRO × recompute × precision; writes docs/combinations.md.

python -m tools.combinations             all of them (several minutes)
python -m tools.combinations gpt         those whose name holds all the words
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import weft
from examples import gpt_model
from examples.models import images, resnet
from tools.model_cases import Case, Trained, Training, cast, distance, flat, loss_distance
from tools.scores.stamp import Stamp, stamp_now

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
STEPS, SIZE, MICRO_BATCHES = 3, 8, 4
# float64: the order of sums is all that may differ. bfloat16: as much again as it differs from float32.
LIMITS: dict[str | None, float] = {None: 1e-9, "bf16": 2.0}
# A relative difference of losses in bfloat16 that counts as much as its difference from float32: its
# rounding unit.
BF16_LOSS = 2**-8
RATE, EPS = 1e-2, 1e-3
# The least that a difference is relative to.
FLOOR = 1e-2
COMMAND = "python -m tools.combinations"
SOURCES = (
    *("src/weft", "tools/combinations.py", "tools/model_cases.py", "examples/gpt_model.py"),
    "examples/models",
)
S, B = weft.split, weft.broadcast


@dataclass(frozen=True)
class Mesh:
    """How the four ranks are used: their grid, the SBPs of the batch and of a split tensor, the stages."""

    grid: Any
    batch: Any
    tensor: Callable[[Any], Any] | None = None
    stages: int = 1


def _tokens(size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(16, (size, 7), generator=generator)
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


WORKS = {
    "gpt": Case(
        partial(gpt_model.GPT, layers=2, width=8, heads=2, length=6, vocabulary=16),
        gpt_model.loss_fn,
        _tokens,
        {
            "blocks.*.qkv.*": S(0),
            "blocks.*.up.*": S(0),
            "blocks.*.proj.weight": S(1),
            "blocks.*.down.weight": S(1),
        },
    ),
    "resnet": Case(
        partial(resnet.ResNet, (1, 1), 5, 4),
        images.loss,
        partial(images.batch, side=32, classes=5),
        resnet.LAYOUTS,
    ),
}

PAIRS = [[0, 1], [2, 3]]
MESHES = {
    "data 4": Mesh([0, 1, 2, 3], S(0)),
    "tensor 4": Mesh([0, 1, 2, 3], B, lambda sbp: sbp),
    "data 2 × tensor 2": Mesh(PAIRS, (S(0), B), lambda sbp: (B, sbp)),
    "pipeline 4": Mesh([0, 1, 2, 3], S(0), stages=4),
    "pipeline 2 × data 2": Mesh(PAIRS, S(0), stages=2),
    "pipeline 2 × tensor 2": Mesh(PAIRS, B, lambda sbp: sbp, stages=2),
}


@dataclass(frozen=True)
class Combination:
    """One way to train one model."""

    work: str
    mesh: str
    zero: Literal[0, 1, 2, 3]
    recompute: bool
    precision: Literal["bf16"] | None

    def __str__(self) -> str:
        words = [self.work, self.mesh, f"zero {self.zero}"]
        words += ["recompute"] * self.recompute + [self.precision or "float64"]
        return ", ".join(words)

    def strategy(self) -> weft.Strategy:
        """The strategy that a user would write."""
        mesh, layouts = MESHES[self.mesh], WORKS[self.work].layouts
        split = mesh.tensor
        stages: dict[str, Any] = {"stages": mesh.stages} if mesh.stages > 1 else {}
        return weft.Strategy(
            batch={"*": mesh.batch},
            parameters={name: split(sbp) for name, sbp in layouts.items()} if split else {},
            micro_batches=MICRO_BATCHES,
            zero=weft.Zero(level=self.zero, axis=0) if self.zero else None,
            recompute=["blocks.*"] if self.recompute else [],
            precision=self.precision,
            **stages,
        )


def combinations() -> Iterator[Combination]:
    """All of them."""
    levels: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    precisions: tuple[Literal["bf16"] | None, ...] = (None, "bf16")
    every = itertools.product(WORKS, MESHES, levels, (False, True), precisions)
    return (Combination(*choice) for choice in every)


def difference(combination: Combination) -> float:
    """Train on four ranks of this process, and compare."""
    with weft.local_world(4):
        return compared(combination, *train(combination))


def compared(
    combination: Combination, losses: Sequence[float], state: Mapping[str, torch.Tensor]
) -> float:
    """The difference of losses and state from plain PyTorch.

    In float64 the largest one, relative to the largest element. In bfloat16, in which each number
    rounds by itself, in units of what plain PyTorch in bfloat16 differs from itself in float32.
    """
    work, precision = combination.work, combination.precision
    expected_losses, expected = _plainly(work, precision)
    loss = loss_distance(losses, expected_losses)
    if precision is None:
        return max(loss, *(distance(state[name], x, FLOOR) for name, x in expected.items()))
    _, exact = _plainly(work, precision, rounded=False)
    names = [name for name, _ in _training(work, precision).model.named_parameters()]
    found, rounded, whole = (flat(names, x) for x in (state, expected, exact))
    return max(loss / BF16_LOSS, float((found - rounded).norm() / (whole - rounded).norm()))


def train(combination: Combination) -> Trained:
    """Losses and last state with weft, in a world of four ranks that is already there."""
    training = _training(combination.work, combination.precision)
    return training.by_weft(MESHES[combination.mesh].grid, combination.strategy())


@cache
def _training(work: str, precision: str | None) -> Training:
    case, dtype = WORKS[work], torch.float32 if precision else torch.float64
    torch.manual_seed(0)
    batches = [cast(case.batch(SIZE, seed), dtype) for seed in range(STEPS)]
    torch.manual_seed(0)
    return Training(case.build().to(dtype), case.loss, batches, _optimizer)


@cache
def _plainly(work: str, precision: str | None, rounded: bool = True) -> Trained:
    """Plain PyTorch on one device, gradients accumulated over the micro-batches.

    Args:
        work: name of the model.
        precision: of the ops that autocast rounds.
        rounded: False leaves them in float32.
    """
    autocast = precision == "bf16" and rounded
    return replace(_training(work, precision), autocast=autocast).plainly(MICRO_BATCHES)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """A large eps: some gradients are zero but for rounding, and Adam would divide it by itself."""
    if next(model.parameters()).dtype == torch.float32:
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, eps=EPS)


def main(words: Sequence[str]) -> int:
    """Compare the combinations that hold all words, or all. Returns how many differ."""
    warnings.simplefilter("ignore")
    stamp = stamp_now(COMMAND, SOURCES)
    cells: dict[Combination, str] = {}
    for combination in combinations():
        if not all(word in str(combination) for word in words):
            continue
        try:
            cells[combination] = cell_of(combination, difference(combination))
        except Exception as error:
            cells[combination] = f"**{type(error).__name__}**"
            print(f"{combination}: {error}", flush=True)
        print(f"{combination}: {cells[combination]}", flush=True)
    if not words:
        PAGE.write_text(page(cells, stamp))
    return sum(cell.startswith("**") for cell in cells.values())


def cell_of(combination: Combination, found: float) -> str:
    """A difference, bold and with the limit when it is above it."""
    limit = LIMITS[combination.precision]
    digits = ".1e" if combination.precision is None else ".3g"
    return f"{found:{digits}}" if found <= limit else f"**{found:{digits}} > {limit:g}**"


def cells_of(text: str) -> dict[Combination, str]:
    """The cells of a page."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows[2:] for cell in row[3:]]
    return dict(zip(sorted(combinations(), key=_place), cells, strict=True))


def _place(combination: Combination) -> tuple[int, ...]:
    """Where a combination stands on the page: model, ranks, precision; then level, recompute."""
    c = combination
    row = list(WORKS).index(c.work), list(MESHES).index(c.mesh), c.precision is not None
    return (*row, c.zero, c.recompute)


def page(cells: Mapping[Combination, str], stamp: Stamp) -> str:
    """The whole page: a row for each model, mesh and precision, a column for each level and recompute."""
    kinds = list(dict.fromkeys((c.zero, c.recompute) for c in cells))
    rows = list(dict.fromkeys((c.work, c.mesh, c.precision) for c in cells))
    names = [f"ZeRO {zero}{', recompute' * recompute}" for zero, recompute in kinds]
    table = [["model", "ranks", "precision", *names], ["---"] * (3 + len(names))]
    for work, mesh, precision in rows:
        row = [cells[Combination(work, mesh, *kind, precision)] for kind in kinds]
        table.append([work, mesh, precision or "float64", *row])
    equal = sum(not cell.startswith("**") for cell in cells.values())
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([HEAD.format(stamp=stamp), f"Equal: {equal} of {len(cells)}.", "", *lines, ""])


HEAD = f"""# Combinations

Which parallelisms are combined in the tests, and how far the results are from one device's.

{{stamp}}

A small GPT and a small ResNet train {STEPS} steps on 4 ranks, threads of one process, {MICRO_BATCHES} micro-batches a
step, and on one device with plain PyTorch, whose gradients accumulate over the same micro-batches.

- float64, AdamW (rate {RATE:g}, weight decay 0.1, eps {EPS:g} in both: some gradients are zero but for rounding, which
  Adam would divide by itself): a cell is the largest difference of losses, relative, and of parameters and buffers,
  relative to the largest element of each tensor or to {FLOOR:g}, whichever is more; up to {LIMITS[None]:g} is equal.
- bf16, SGD (rate {RATE:g}, momentum 0.9), compared with `torch.autocast`: a cell is the difference of all parameters in
  units of what `torch.autocast` itself differs from float32 (a relative difference of losses of 2**-8 counts as 1);
  up to {LIMITS["bf16"]:g} is equal.
- ZeRO is along the first axis of a stage's placement.
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
