"""The same training by Ray Train: Ray starts the workers, and all of them again when one has died.

    python recipes/ray_trainer.py --out runs/gpt --workers 2

On a cluster `--out` is a folder that all its nodes see; `ray job submit` runs this file there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from small_gpt import STEPS
from train import train


def work(job: dict[str, Any]) -> None:
    """A worker's part: Ray has set RANK and WORLD_SIZE and made the process group, as torchrun would."""
    train(Path(job["out"]), job["steps"], job["die_at"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on Ray's workers.")
    parser.add_argument("--out", type=Path, required=True, help="losses and checkpoints")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--failures", type=int, default=3, help="after which Ray gives up")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--die-at", type=int, help="as of train.py")
    o = parser.parse_args()
    out = o.out.absolute()
    trainer = TorchTrainer(
        work,
        train_loop_config={"out": str(out), "steps": o.steps, "die_at": o.die_at},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=o.workers),
        run_config=RunConfig(
            name="gpt",
            storage_path=str(out / "ray"),
            failure_config=FailureConfig(max_failures=o.failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
