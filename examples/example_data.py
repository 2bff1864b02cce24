"""Scikit-learn's handwritten digits, which need no download, and the training of models that tell their classes."""

from __future__ import annotations

from functools import cache

import torch
from gallery import Plain, Run
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import weft

Batch = dict[str, Tensor]


@cache
def digits(side: int = 8) -> tuple[Batch, Batch]:
    """1437 to train on and 360 to test on: "x" float32 [n, 1, side, side] in [0, 1], "y" the digits int64 [n]."""
    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, classes, test_size=360, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)

    def images(x: Tensor) -> Tensor:
        small = x.float().reshape(-1, 1, 8, 8)
        return small if side == 8 else interpolate(small, (side, side), mode="bilinear")

    return {"x": images(train_x), "y": train_y}, {"x": images(test_x), "y": test_y}


def digit_batches(steps: int, size: int = 64, side: int = 8) -> list[Batch]:
    """Random batches of the digits to train on; all ranks draw the same."""
    train, _ = digits(side)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(train["y"]), (steps, size), generator=generator)
    return [{name: values[chosen] for name, values in train.items()} for chosen in rows]


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a model that gives logits [n, 10]."""
    return cross_entropy(model(batch["x"]), batch["y"])


def right(model: nn.Module, batch: Batch) -> Tensor:
    """How many classes it gets right."""
    return (model(batch["x"]).argmax(1) == batch["y"]).sum()


def learn_classes(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, side: int = 8
) -> None:
    """Train a model on the digits as the command line asks for it, and count what it gets right of those held back."""
    plain = Plain(model, (class_loss, optimizer))
    batches, (_, test) = digit_batches(run.steps, side=side), digits(side)
    with run.world():
        program = weft.compile(
            model, class_loss, optimizer, batches[0], placement=run.placement, strategy=run.strategy
        )
        run.train(batches, plain, program)
        found = int(program.evaluation(right, test).step(test))
        run.say(f"{found} of {len(test['y'])} digits of the test right")
        run.finish(program)
