"""Seconds to plan a GPT of 6, 24 and 96 layers for two ranks, and to compile its kernels.

    OMP_NUM_THREADS=1 python -m benchmarks.compile_time

Planning is all of `weft.compile` but the kernels: capture, layouts, plan, first values of the shards. Kernels are
those of `kernels="inductor"`, compiled in an empty cache; what Inductor does once for all programs, such as compiling
torch's headers, is done before. Seconds are the processor's, compilers included, of which one runs at a time: on a
machine that does nothing else they are those of the clock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

import weft
from benchmarks.measure import save
from examples.gpt_model import GPT, Batch, loss_fn
from weft.runtime.compiled import parts
from weft.runtime.compiled.choice import KernelChoice, Kernels, choose

STRATEGIES = {
    "data_parallel": weft.data_parallel(),
    "tensor_parallel": weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"]),
    "zero3": weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(level=3)),
    "pipeline": weft.Strategy(stages=2, micro_batches=4),
}
LENGTH = 64


def work_seconds() -> float:
    """Seconds of the processor that this process has used, and those that it started and that have ended."""
    return sum(os.times()[:4])


def compile_seconds(
    layers: int,
    width: int,
    batch: Batch,
    strategy: weft.Strategy,
    kernels: Kernels = "aten",
) -> float:
    """Seconds for `weft.compile` of a model on the meta device."""
    with torch.device("meta"):
        model = GPT(layers, width, heads=width // 64, length=batch["x"].shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with weft.local_world(2):
        start = work_seconds()
        program = weft.compile(
            model,
            loss_fn,
            optimizer,
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=strategy,
            kernels=kernels,
        )
        seconds = work_seconds() - start
        program.close()
    return seconds


def kernel_seconds(layers: int, width: int, batch: Batch, prepared: str) -> float:
    """Seconds in which parts are compiled, with nothing of them in a cache.

    Args:
        layers, width, batch: of the model.
        prepared: a folder with what Inductor makes once for all programs.
    """
    spent: list[float] = []

    def timed(*args: Any) -> KernelChoice:
        start = work_seconds()
        try:
            return choose(*args)
        finally:
            spent.append(work_seconds() - start)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["WEFT_CACHE"] = str(shutil.copytree(prepared, folder, dirs_exist_ok=True))
        with patch.object(parts, "choose", timed):
            compile_seconds(layers, width, batch, STRATEGIES["data_parallel"], "inductor")
    print(f"{layers} layers: kernels in {sum(spent):.1f} s", flush=True)
    return sum(spent)


def kernel_growth(counts: list[int], width: int, batch: Batch) -> dict[str, Any]:
    """Seconds for the kernels of models of so many layers, and how they grow at the end."""
    with tempfile.TemporaryDirectory() as prepared:
        os.environ["WEFT_CACHE"] = prepared
        other = {name: tokens[:2] for name, tokens in batch.items()}
        compile_seconds(1, 64, other, STRATEGIES["data_parallel"], "inductor")
        seconds = {n: kernel_seconds(n, width, batch, prepared) for n in sorted(counts)}
    last = list(seconds.values())[-2:]
    return {"seconds": seconds, "last_growth": last[-1] / last[0]}


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
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True)
    o = parser.parse_args()
    tokens = torch.zeros(8, LENGTH, dtype=torch.int64)
    batch = {"x": tokens, "y": tokens}
    compile_seconds(
        1, 64, batch, weft.data_parallel()
    )  # what the first compilation costs by itself
    result: dict[str, Any] = {}
    for name in o.strategies:
        seconds = {
            layers: statistics.median(
                compile_seconds(layers, o.width, batch, STRATEGIES[name]) for _ in range(o.repeats)
            )
            for layers in o.layers
        }
        result[name] = {"planning_seconds": seconds, "growth_over_linear": growth(seconds)}
    if o.kernels:
        result["kernels"] = kernel_growth(o.layers, o.width, batch)
    bound = "planning: growth_over_linear <= 1; kernels: last_growth < 1.5"
    save("compile_time", {**result, "bound": bound})


if __name__ == "__main__":
    main()
