"""The training of all recipes in one process of plain PyTorch: the losses that each of them must show.

    python recipes/plain.py --out runs/plain.json

Takes the steps of `train.py`, in its order.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain, islice, repeat
from pathlib import Path

from small_gpt import BATCH, STEPS, Progressions, loss_fn, make
from torch.utils.data import DataLoader


def losses(steps: int) -> list[float]:
    """The loss of each step."""
    model, optimizer, schedule = make()
    loader = DataLoader(Progressions(), BATCH)
    found = []
    for batch in islice(chain.from_iterable(repeat(loader)), steps):
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses of one process of plain PyTorch.")
    parser.add_argument("--out", type=Path, required=True, help="a JSON list of the losses")
    parser.add_argument("--steps", type=int, default=STEPS)
    o = parser.parse_args()
    o.out.parent.mkdir(parents=True, exist_ok=True)
    o.out.write_text(json.dumps(losses(o.steps)))


if __name__ == "__main__":
    main()
