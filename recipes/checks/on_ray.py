"""Ray Train: a local cluster of Ray's, and a worker that dies."""

from __future__ import annotations

from recipes.harness import DIES_AT, Work

# It starts all its processes, and the workers twice.
SECONDS = 480.0


def ray_train(work: Work) -> str:
    """Ray starts the workers again, and they go on from their newest checkpoint."""
    python = work.python_with("ray")
    out = work.folder("ray")
    options = ["--out", str(out), "--workers", "2", "--die-at", str(DIES_AT)]
    work.run([python, "recipes/ray_trainer.py", *options], "ray", SECONDS)
    return work.losses(out, killed=True)
