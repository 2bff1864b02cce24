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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from small_gpt import BATCH, STEPS, Progressions, loss_fn, make
from torch.utils.data import default_collate

import weft


class Log(ABC):
    """Figures for a library's own client, which is opened in the first call: the first process alone makes one."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.client: Any = None

    @abstractmethod
    def __call__(self, step: int, figures: Mapping[str, float]) -> None: ...


class TensorBoard(Log):
    """Scalars in event files."""

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        if self.client is None:
            make = import_module("torch.utils.tensorboard").SummaryWriter
            # Steps that a restart makes anew are shown once.
            self.client = make(str(self.out / "tensorboard"), purge_step=step)
        for name, value in figures.items():
            self.client.add_scalar(name, value, step)
        self.client.flush()


class WeightsAndBiases(Log):
    """A run on this disk."""

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        if self.client is None:
            wandb = import_module("wandb")
            self.client = wandb.init(project="recipes", dir=self.out, mode="offline")
        self.client.log(dict(figures), step=step)


class Prometheus(Log):
    """The newest figures as gauges, for the textfile collector of Prometheus's node exporter."""

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        library = import_module("prometheus_client")
        if self.client is None:
            self.client, self.gauges = library.CollectorRegistry(), dict[str, Any]()
        for name, value in {**figures, "step": step}.items():
            if name not in self.gauges:
                made = library.Gauge(f"weft_{name}", name, ["run"], registry=self.client)
                self.gauges[name] = made.labels(self.out.name)
            self.gauges[name].set(value)
        library.write_to_textfile(str(self.out / "weft.prom"), self.client)


LOGS: dict[str, type[TensorBoard | WeightsAndBiases | Prometheus]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "prometheus": Prometheus,
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
