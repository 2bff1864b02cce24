"""Train a small GPT on all ranks: the one script that every recipe starts, unchanged.

    weft run -n 2 recipes/train.py --out runs/gpt
    torchrun --nproc-per-node 2 recipes/train.py --out runs/gpt

It goes on from the newest checkpoint below `--out`: whoever starts it after a failure starts it as before. `--die-at`
kills the first process, once, to try whether a cluster does.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from small_gpt import BATCH, STEPS, Progressions, loss_fn, make
from torch.utils.data import default_collate

import weft

# Each takes the folder of the run.
LOGS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": lambda out: weft.logs.TensorBoard(out / "tensorboard"),
    "wandb": lambda out: weft.logs.WeightsAndBiases(project="recipes", dir=out, mode="offline"),
    "prometheus": lambda out: weft.logs.Prometheus(out / "weft.prom", labels={"run": out.name}),
}


def train(
    out: Path, steps: int = STEPS, die_at: int | None = None, logs: Sequence[str] = ()
) -> Mapping[str, float]:
    """Train on all ranks of the job, from the newest checkpoint below `out` on; gives the last figures."""
    out.mkdir(parents=True, exist_ok=True)
    model, optimizer, schedule = make()
    data = Progressions()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    program = weft.compile(
        model,
        loss_fn,
        optimizer,
        default_collate([data[row] for row in range(BATCH)]),
        placement=weft.placement("cpu", range(ranks)),
        strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(1)),
    )
    log = [weft.logs.JsonLines(out / "losses.jsonl"), *(LOGS[name](out) for name in logs)]
    ended = weft.fit(
        program,
        weft.Loader(data, BATCH, program),
        steps=steps,
        schedulers=[schedule],
        checkpoint=weft.Checkpoints(out / "checkpoints", every=5),
        log=[*log, *([] if die_at is None else [killer(die_at, out / "killed")])],
        log_every=1,
        progress=False,
    )
    program.close()
    return ended.figures


def killer(step: int, mark: Path) -> Callable[[int, Mapping[str, float]], None]:
    """A log that kills the process that writes it after a step, unless the file `mark` is there."""

    def kill(now: int, _: Mapping[str, float]) -> None:
        if now == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on all ranks.")
    parser.add_argument("--out", type=Path, required=True, help="losses and checkpoints")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--die-at", type=int, help="kill the first process after this step, once")
    parser.add_argument("--logs", nargs="*", default=(), choices=LOGS, help="besides losses.jsonl")
    o = parser.parse_args()
    train(o.out, o.steps, o.die_at, o.logs)


if __name__ == "__main__":
    main()
