"""One rank of a job whose batches have texts beside tensors (test_data_on_processes.py): its plans and errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from weft.errors import BatchError


class Images(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 82

    def __getitem__(self, n: int) -> dict[str, Any]:
        tags = ["a", f"t{n % 3}"]
        return {"x": torch.tensor([float(n)]), "path": f"image-{n}.png", "tags": tags, "n": n}


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).square().mean(), batch["x"]


def returned(model: nn.Module, batch: Any) -> Any:
    return *loss(model, batch), batch["path"]


def read(model: nn.Module, batch: Any) -> Any:
    first, x = loss(model, batch)
    return first * len(batch["path"][0]), x


def lengths(model: nn.Module, batch: Any) -> Any:
    first, x = loss(model, batch)
    return first / len(batch["path"]) * x.shape[0], x


def main() -> dict[str, Any]:
    data, found = Images(), {}
    for batch in ("whole", "local"):
        size = 4 if batch == "whole" else 2
        example = default_collate([data[n] for n in range(size)])
        for function in (loss, lengths, returned, read):
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            name = f"{function.__name__}, {batch}"
            try:
                program = weft.compile(
                    *(model, function, optimizer, example),
                    placement=weft.placement("cpu", [0, 1]),
                    batch=batch,  # type: ignore[arg-type]
                )
                loader = weft.Loader(data, 4, program)
                seen = [x for each in loader for x in program.step(each)[1].flatten().tolist()]
                found[name] = [seen == list(range(82)), len(program._core.variants._all)]
            except BatchError as error:
                found[name] = str(error)
            if (
                function is loss and batch == "local"
            ):  # rows of each process's own, without a loader
                rank = int(os.environ["RANK"])
                for n in range(18):
                    program.step(default_collate([data[2 * rank], data[n]]))
                found["own rows"] = len(program._core.variants._all)
            program.close()
    return found


if __name__ == "__main__":
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(main()))
