"""Run all recipes that this machine can run: `python -m recipes`, or `make recipes`.

    python -m recipes --only slurm ssh
    python -m recipes --offline             install nothing

Each must show the losses of one process of plain PyTorch. What a recipe needs from pip it installs below `--out`, by
constraints.txt; what needs root or a Debian package is skipped with a line that says so. Prints a table, writes it as
JSON, and ends with 1 where a recipe failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from recipes.checks import (
    on_hosts,
    on_kubernetes,
    on_ray,
    on_slurm,
    on_ssh,
    with_frameworks,
    with_logs,
)
from recipes.harness import ROOT, Missing, Work, Wrong

RECIPES: dict[str, Callable[[Work], str]] = {
    "weft-run": on_hosts.weft_run,
    "torchrun": on_hosts.torchrun,
    "weft-run-hosts": on_hosts.weft_run_on_hosts,
    "torchrun-hosts": on_hosts.torchrun_on_hosts,
    "slurm": on_slurm.slurm,
    "logs": with_logs.logs,
    "ray": on_ray.ray_train,
    "huggingface": with_frameworks.huggingface,
    "accelerate": with_frameworks.accelerate,
    "lightning": with_frameworks.lightning,
    "kubernetes-manifests": on_kubernetes.manifests,
    "kubernetes-entry": on_kubernetes.entry,
    "ssh": on_ssh.ssh,
}
SEEN, SKIPPED, FAILED = "seen", "skipped", "failed"


def run(name: str, work: Work) -> dict[str, object]:
    """Run a recipe; gives its row of the table."""
    start = time.monotonic()
    try:
        how, text = SEEN, RECIPES[name](work)
    except Missing as missing:
        how, text = SKIPPED, f"needs {missing}"
    except Wrong as wrong:
        how, text = FAILED, str(wrong)
    seconds = round(time.monotonic() - start, 1)
    return {"recipe": name, "how": how, "text": text, "seconds": seconds}


def main() -> int:
    """Run recipes; returns 1 where one failed."""
    parser = argparse.ArgumentParser(description="Run recipes and compare their losses.")
    parser.add_argument("--only", nargs="+", choices=RECIPES, help="these alone")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "recipes")
    parser.add_argument("--offline", action="store_true", help="install nothing")
    o = parser.parse_args()
    work = Work(o.out.absolute(), install=not o.offline, environment=dict(os.environ))
    rows = []
    for name in o.only or RECIPES:
        rows.append(run(name, work))
        row = rows[-1]
        print(f"{row['recipe']:20} {row['how']:7} {row['seconds']:6} s  {row['text']}", flush=True)
    work.out.mkdir(parents=True, exist_ok=True)
    (work.out / "seen.json").write_text(json.dumps(rows, indent=1))
    return 1 if any(row["how"] == FAILED for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
