"""One rank of a job whose program takes rows of each process (test_data_on_processes.py): what it trains on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from weft.errors import UserError

NUMBERS = torch.arange(23.0)[:, None]


class Stream(IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return ((each,) for each in NUMBERS)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).sum(), batch[0]


def numbers_of(made: Any) -> list[float]:
    found: list[float] = made[1].flatten().tolist()
    return found


def compiled(**options: Any) -> weft.Program:
    model = nn.Linear(1, 1)
    return weft.compile(
        *(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), [NUMBERS[:4]]),
        placement=weft.placement("cpu", list(range(int(os.environ["WORLD_SIZE"])))),
        batch="local",
        **options,
    )


def padded() -> list[float]:
    """Each process has all rows, and takes its own; none is padded here."""
    with_buckets = compiled(shapes=weft.Buckets((1, 4), {"*": 0.0}))
    loader = weft.Loader(TensorDataset(NUMBERS), 9, with_buckets)
    found = [each for batch in loader for each in numbers_of(with_buckets.step(batch))]
    with_buckets.close()
    return found


def main() -> dict[str, Any]:
    program, data = compiled(), TensorDataset(NUMBERS)
    size = 4 * int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}

    def steps(name: str, loader: Any, by: weft.Program = program) -> None:
        found[name] = [each for batch in loader for each in numbers_of(by.step(batch))]

    steps("planned", weft.Loader(data, size, program))
    steps("seven", weft.Loader(data, 7, program))
    steps("two", weft.Loader(TensorDataset(NUMBERS[:7]), 2, program))
    steps("unsplit", weft.Loader(data, size, program, split=False))
    steps("stream", weft.Loader(Stream(), size, program))
    ahead = weft.Loader(data, size, program, shuffle=True, workers=1)
    found["ahead"] = [each for made in program.run(ahead) for each in numbers_of(made)]
    first, second = (weft.Loader(data, 7, program, shuffle=True, seed=3) for _ in range(2))
    steps("head", [next(iter(first))])
    second.load_state_dict(first.state_dict())
    steps("rest", second)
    evaluation = program.evaluation(loss_fn, [NUMBERS[:4]])
    for name, by in (("evaluation", evaluation), ("of the program", program)):
        steps(name, weft.Loader(data, size, by), evaluation)
    rates: list[float] = []

    def log(_: int, figures: weft.logs.Figures) -> None:
        rates.append(figures["samples_per_second"] / figures["steps_per_second"])

    weft.fit(program, weft.Loader(data, size, program), epochs=1, log=[log], log_every=1)
    weft.fit(program, [[NUMBERS[:4]]], epochs=1, log=[log], log_every=1)
    found["rates"] = [round(each, 3) for each in rates]
    try:
        program.step(next(iter(weft.Loader(data, size))))
    except UserError as error:
        found["without"] = str(error)
    program.close()
    return {**found, "padded": padded()}


if __name__ == "__main__":
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(main()))
