"""Memory over many small steps: resident bytes and live tensors must not grow.

    OMP_NUM_THREADS=1 python -m benchmarks.memory_flat

Two ranks in one process train a small GPT: data parallel, with ZeRO 3, and as a pipeline of micro-batches. The first
tenth of the steps warms up and does not count.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
from torch import Tensor

import weft
from benchmarks.measure import save
from benchmarks.memory import resident_bytes
from examples.gpt_model import GPT, loss_fn

DATA = {"*": weft.split(0)}
STRATEGIES = {
    "data parallel": weft.data_parallel(),
    "zero 3": weft.Strategy(batch=DATA, zero=weft.Zero(level=3)),
    "pipeline": weft.Strategy(stages=2, micro_batches=4),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory over many steps.")
    sizes = {"layers": 2, "width": 32, "heads": 2, "length": 16, "batch": 8}
    for name, size in {**sizes, "steps": 2000, "samples": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args()


def live_tensors() -> tuple[int, int]:
    """How many tensors Python knows, and the bytes of their storages."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    # The parts of global tensors are tensors themselves.
    plain = [each for each in tensors if not isinstance(each, weft.GlobalTensor)]
    storages = {id(each.untyped_storage()): each.untyped_storage() for each in plain}
    return len(tensors), sum(storage.nbytes() for storage in storages.values())


def watch(strategy: weft.Strategy, o: argparse.Namespace) -> dict[str, Any]:
    """Train, and look at memory after every part of the steps."""
    torch.manual_seed(0)
    model = GPT(o.layers, o.width, o.heads, o.length)
    tokens = torch.randint(256, (o.batch, o.length + 1))
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    resident, tensors, tensor_bytes = [], [], []
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        program = weft.compile(
            model, loss_fn, optimizer, batch, placement=placement, strategy=strategy
        )
        for _ in range(o.samples):
            for _ in range(o.steps // o.samples):
                loss = float(program.step(batch))
            count, size = live_tensors()
            resident.append(resident_bytes())
            tensors.append(count)
            tensor_bytes.append(size)
        program.close()
    return {
        "resident_bytes": resident,
        "live_tensors": tensors,
        "live_tensor_bytes": tensor_bytes,
        "resident_growth_bytes": resident[-1] - resident[0],
        "live_tensor_growth": tensors[-1] - tensors[0],
        "last_loss": loss,
    }


def main() -> None:
    o = options()
    found = {name: watch(strategy, o) for name, strategy in STRATEGIES.items()}
    bound = "live_tensor_growth <= 0, resident_growth_bytes < 4 MiB"
    save("memory_flat", {**vars(o), **found, "bound": bound})


if __name__ == "__main__":
    main()
