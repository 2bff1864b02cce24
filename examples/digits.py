"""Train an MLP on scikit-learn's handwritten digits: hidden layers data parallel, output layer split by columns.

    weft run -n 2 examples/digits.py

This is the hybrid of OneFlow's manual. It takes three lines more than training on one device: the placement, the
strategy, and `weft.compile`.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import weft

Batch = dict[str, Tensor]


def digits() -> tuple[Batch, Batch]:
    """1437 images to train on and 360 to test on, 8×8 pixels in [0, 1] each."""
    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, classes, test_size=360, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)
    return {"x": train_x.float(), "y": train_y}, {"x": test_x.float(), "y": test_y}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def correct(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]).argmax(1) == batch["y"]).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="An MLP on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="images of one step")
    options = parser.parse_args()
    train, test = digits()
    if options.epochs < 1 or not 1 <= options.batch <= len(train["x"]):
        parser.error(f"--epochs takes a number from 1, --batch one from 1 to {len(train['x'])}")

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [
        {"x": x, "y": y}
        for x, y in zip(train["x"].split(options.batch), train["y"].split(options.batch))
        if len(x) == options.batch
    ]

    placement = weft.placement("cpu", range(int(os.environ.get("WORLD_SIZE", "1"))))
    strategy = weft.Strategy({"*": weft.split(0)}, {"4.*": weft.split(0), "*": weft.broadcast})
    program = weft.compile(
        model, loss_fn, optimizer, batches[0], placement=placement, strategy=strategy
    )
    evaluation = program.evaluation(correct, test)
    for epoch in range(options.epochs):
        losses = [float(program.step(batch)) for batch in batches]
        found = int(evaluation.step(test))
        if os.environ.get("RANK", "0") == "0":
            mean = sum(losses) / len(losses)
            print(f"epoch {epoch}: loss {mean:.4f}, {found} of {len(test['y'])} digits right")


if __name__ == "__main__":
    main()
