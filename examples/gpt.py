"""Train a byte-level GPT on the source files of Python's standard library, then compare with plain PyTorch.

    weft run -n 2 examples/gpt.py --strategy hybrid

A hybrid: most of the model is data parallel; the last block's feed-forward net and the head are split over the same
ranks by columns and rows (tensor parallel). Then rank 0 alone takes the same steps with plain PyTorch, on all
cores that it may use: what one process makes of the machine is what several are compared with.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import torch
from curves import compare, train
from example_text import text_batches
from gpt_model import GPT, Batch, loss_fn
from torch import Tensor

import weft

RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
TOLERANCE = 1e-4  # of a loss
SIZES = {"steps": 60, "batch": 16, "length": 128, "layers": 4, "width": 256, "heads": 4}


def hybrid(last: int) -> weft.Strategy:
    """Patterns of names; the first that fits counts."""
    return weft.Strategy(
        batch={"*": weft.split(0)},
        parameters={
            f"blocks.{last}.up.*": weft.split(0),
            f"blocks.{last}.down.weight": weft.split(1),
            "head.*": weft.split(0),
            "*": weft.broadcast,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A byte-level GPT, on several ranks and on one.")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--strategy", choices=("hybrid", "data"), default="hybrid")
    parser.add_argument("--check", action="store_true", help="fail where losses differ")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="for summary.json")
    parser.add_argument("--report", type=Path, help="an HTML file to write at the end")
    o = parser.parse_args()
    for name in SIZES:
        if getattr(o, name) < 1:
            parser.error(f"--{name} takes a number from 1, found {getattr(o, name)}")
    if o.width % o.heads:
        parser.error(f"--width takes a multiple of --heads, found {o.width} and {o.heads}")

    torch.manual_seed(0)
    batches = text_batches(o.steps, o.batch, o.length)
    model = GPT(o.layers, o.width, o.heads, o.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alone, own = copy.deepcopy((model, optimizer))

    strategy = hybrid(o.layers - 1) if o.strategy == "hybrid" else weft.data_parallel()
    placement = weft.placement("cpu", range(RANKS))
    program = weft.compile(
        model, loss_fn, optimizer, batches[0], placement=placement, strategy=strategy
    )
    found = train(f"ranks: {RANKS}", program.step, batches, show=RANK == 0)
    if o.report is not None:
        program.report(o.report)
    program.close()

    def plain_step(batch: Batch) -> Tensor:
        own.zero_grad()
        loss = loss_fn(alone, batch)
        loss.backward()
        own.step()
        return loss.detach()

    if RANK == 0:
        o.out.mkdir(parents=True, exist_ok=True)
        strategy.save(o.out / "strategy.yaml")
        threads = len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        plain = train(f"plain PyTorch, threads: {threads}", plain_step, batches, show=True)
        text = (o.out / "strategy.yaml").read_text()
        difference = compare(found, plain, RANKS, threads, text, o.out)
        print(f"losses as plain PyTorch to {difference:.0e}")
        if o.check and difference > TOLERANCE:
            raise SystemExit(f"losses differ from plain PyTorch's by {difference:.0e}")


if __name__ == "__main__":
    main()
