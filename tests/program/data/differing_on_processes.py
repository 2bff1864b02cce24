"""One rank of a job whose processes have other data, started by test_data_on_processes.py: what each case is told."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from weft.errors import WeftError

RANK = int(os.environ["RANK"])


def sample(number: int, **more: Any) -> dict[str, Any]:
    return {"x": torch.tensor([float(number)]), **more}


class Numbered(Dataset[dict[str, Any]]):
    def __init__(self, of: Callable[[int], dict[str, Any]], numbers: list[int]) -> None:
        self.of, self.numbers = of, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.of(self.numbers[place])


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(
        self, of: Callable[[int], dict[str, Any]], numbers: Callable[[], list[int]]
    ) -> None:
        self.of, self.numbers = of, numbers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.of, self.numbers())


def shuffled() -> list[int]:
    return np.random.default_rng(RANK).permutation(16).tolist()  # as without a seed


def late(number: int) -> dict[str, Any]:
    """The last batches alone differ."""
    return sample(number + 100 * RANK * (number > 11))


own = random.Random(RANK)
ALL = list(range(16))
MAPPED = {
    "reversed": Numbered(sample, ALL[:: 1 - 2 * RANK]),
    "shuffled": Numbered(sample, shuffled()),
    "labels alone": Numbered(lambda n: sample(0, y=f"{n}.png"), shuffled()),
    "images": Numbered(lambda n: sample(0, image=np.full((2, 2), n, np.uint8)), shuffled()),
}
STREAMED = {
    "split by rank": Stream(sample, lambda: ALL[RANK::2]),
    "other order": Stream(sample, shuffled),
    "own draws": Stream(lambda n: sample(n, noise=own.random()), lambda: ALL),
    "late": Stream(late, lambda: ALL),
}
ALIKE = {
    "seeded": Numbered(lambda n: sample(n, drawn=random.random(), more=torch.rand(3)), ALL),
    "own generator": Numbered(lambda n: sample(n, drawn=own.random(), at=time.time_ns()), ALL),
    "folders": Numbered(lambda n: sample(n, path=f"/of/rank/{RANK}/{n}.png"), ALL),
    "objects": Numbered(
        lambda n: sample(n, of=[object(), lambda: n, None, b"b", float("nan")]), ALL
    ),
    "seeded stream": Stream(
        lambda n: sample(n, drawn=torch.rand(2)), lambda: random.sample(ALL, 16)
    ),
}


def features(samples: list[Any]) -> Any:
    return torch.stack([each["x"] for each in samples])


def main() -> dict[str, str]:
    model, found = nn.Linear(1, 1), {}
    for batch in ("whole", "local"):
        program = weft.compile(
            *(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), lr=0.0)),
            *(torch.zeros(4 if batch == "whole" else 2, 1),),
            placement=weft.placement("cpu", [0, 1]),
            batch=batch,  # type: ignore[arg-type]
        )
        for name, data in {**ALIKE, **MAPPED, **STREAMED}.items():
            workers = int(name in ("shuffled", "seeded", "other order"))
            shuffle = isinstance(data, Numbered)
            loader = weft.Loader(
                *(data, 4, program), shuffle=shuffle, workers=workers, collate_fn=features
            )
            steps = 0
            try:
                for each in loader:
                    program.step(each)
                    steps += 1
                told = "right"
            except WeftError as error:
                told = f"{type(error).__name__}: {error}"
            found[f"{name}, {batch}"] = f"{steps}: {told}"
            if name == "late":
                break
        program.close()
    return found


if __name__ == "__main__":
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(main()))
