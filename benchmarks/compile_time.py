"""Seconds to compile a GPT of 6, 12 and 24 layers for two ranks, and how they grow with the layers.

    OMP_NUM_THREADS=1 python -m benchmarks.compile_time

The model is on the meta device: nothing of its size is allocated.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import weft
from benchmarks.measure import save
from examples.gpt_model import GPT, Batch, loss_fn

STRATEGIES = {
    "data_parallel": weft.data_parallel(),
    "tensor_parallel": weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"]),
}


def compile_seconds(layers: int, batch: Batch, strategy: weft.Strategy) -> float:
    with torch.device("meta"):
        model = GPT(layers, width=512, heads=8, length=batch["x"].shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with weft.local_world(2):
        start = time.perf_counter()
        program = weft.compile(
            model,
            loss_fn,
            optimizer,
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=strategy,
        )
        seconds = time.perf_counter() - start
        program.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile time against the number of layers.")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--repeats", type=int, default=3)
    o = parser.parse_args()
    tokens = torch.zeros(8, 256, dtype=torch.int64)
    batch = {"x": tokens, "y": tokens}
    result = {}
    for name, strategy in STRATEGIES.items():
        times = {
            layers: [compile_seconds(layers, batch, strategy) for _ in range(o.repeats)]
            for layers in o.layers
        }
        medians = {layers: statistics.median(seconds) for layers, seconds in times.items()}
        few, many = min(medians), max(medians)
        growth = (medians[many] / medians[few]) / (many / few)
        result[name] = {
            "first_seconds": times[few][0],
            "median_seconds": medians,
            "growth_relative_to_linear": growth,
        }
    bound = "6 layers under 30 s, growth_relative_to_linear <= 1"
    save("compile_time", {**result, "bound": bound})


if __name__ == "__main__":
    main()
