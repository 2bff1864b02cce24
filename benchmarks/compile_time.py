"""Seconds to plan a GPT of 6, 24 and 96 layers for two ranks, and to compile its kernels.

    OMP_NUM_THREADS=1 python -m benchmarks.compile_time

Planning is all of `weft.compile` but the kernels: capture, layouts, plan, first values of the shards. Kernels are those
of `kernels="inductor"`, compiled in an empty cache; what Inductor does once for all programs, such as compiling torch's
headers, is done before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch

import weft
from benchmarks.measure import save
from examples.gpt_model import GPT, Batch, loss_fn
from weft.runtime.kernel_choice import Kernels

STRATEGIES = {
    "data_parallel": weft.data_parallel(),
    "tensor_parallel": weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"]),
}
LENGTH = 64


def compile_seconds(
    layers: int, width: int, batch: Batch, strategy: weft.Strategy, kernels: Kernels = "aten"
) -> float:
    """Seconds for `weft.compile` of a model on the meta device."""
    with torch.device("meta"):
        model = GPT(layers, width, heads=width // 64, length=batch["x"].shape[1])
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
            kernels=kernels,
        )
        seconds = time.perf_counter() - start
        program.close()
    return seconds


def kernel_seconds(layers: int, width: int, batch: Batch, planning: float) -> float:
    """Seconds that kernels add to `planning`, with nothing of them in a cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WEFT_CACHE"] = folder
        other = {name: tokens[:2] for name, tokens in batch.items()}
        compile_seconds(1, 64, other, weft.data_parallel(), "inductor")
        return compile_seconds(layers, width, batch, weft.data_parallel(), "inductor") - planning


def growth(seconds: dict[int, float]) -> dict[str, float]:
    """How the seconds grow from each number of layers to the next, over the growth of the layers."""
    counts = sorted(seconds)
    pairs = pairwise(counts)
    return {
        f"{few} to {many}": (seconds[many] / seconds[few]) / (many / few) for few, many in pairs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile time against the number of layers.")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 24, 96])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True)
    o = parser.parse_args()
    tokens = torch.zeros(8, LENGTH, dtype=torch.int64)
    batch = {"x": tokens, "y": tokens}
    compile_seconds(
        1, 64, batch, weft.data_parallel()
    )  # what the first compilation costs by itself
    result: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        seconds = {
            layers: statistics.median(
                compile_seconds(layers, o.width, batch, strategy) for _ in range(o.repeats)
            )
            for layers in o.layers
        }
        result[name] = {"planning_seconds": seconds, "growth_over_linear": growth(seconds)}
    if o.kernels:
        planning = result["data_parallel"]["planning_seconds"]
        seconds = {n: kernel_seconds(n, o.width, batch, planning[n]) for n in o.layers}
        last = [seconds[n] for n in sorted(seconds)][-2:]
        result["kernels"] = {"seconds": seconds, "last_growth": last[-1] / last[0]}
    bound = "planning: growth_over_linear <= 1; kernels: last_growth < 1.5"
    save("compile_time", {**result, "bound": bound})


if __name__ == "__main__":
    main()
