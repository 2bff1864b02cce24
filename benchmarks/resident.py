"""Memory of a rank's process after `weft.compile`: what the kernel says that it holds, beside what the plan says.

    OMP_NUM_THREADS=1 python -m benchmarks.resident

Two processes, each one rank; a stack of linear layers, built on the CPU or on the meta device, data parallel and with
ZeRO 3. What the process held before the model was built does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import weft
from benchmarks.measure import save
from benchmarks.memory import resident_bytes

ROOT = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
CASES = [(device, level) for device in ("cpu", "meta") for level in (0, 3)]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of a rank's process after compiling.")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--case", nargs=3, help="device, level, and where a rank writes its row")
    return parser.parse_args()


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def program_of(width: int, layers: int, device: str, level: Literal[0, 1, 2, 3]) -> weft.Program:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    batch = {"x": torch.zeros(8, width), "y": torch.zeros(8, width)}
    strategy = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(level) if level else None)
    placement = weft.placement("cpu", [0, 1])
    optimizer = torch.optim.AdamW(model.parameters())
    return weft.compile(model, loss_fn, optimizer, batch, placement=placement, strategy=strategy)


def rank(o: argparse.Namespace) -> None:
    """What one rank finds."""
    device, path = o.case[0], o.case[2]
    level: Any = int(o.case[1])
    warm = program_of(4, 1, device, 0)  # threads, groups, imports
    warm.step({"x": torch.zeros(8, 4), "y": torch.zeros(8, 4)})
    warm.close()
    gc.collect()
    before = resident_bytes()
    program = program_of(o.width, o.layers, device, level)
    gc.collect()
    held = resident_bytes() - before
    (peak,) = program.memory()
    plan = peak.predicted.parameters + peak.predicted.buffers + peak.predicted.constants
    if os.environ["RANK"] == "0":
        row = {"model on": device, "zero": level, "held_bytes": held, "plan_bytes": plan}
        Path(path).write_text(json.dumps(row))


def main() -> None:
    o = options()
    if o.case:
        rank(o)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for device, level in CASES:
            path = Path(folder) / "row.json"
            own = ["--width", str(o.width), "--layers", str(o.layers), "--case", device, str(level)]
            command = [sys.executable, "-m", "weft", "run", "-n", "2", __file__, *own, str(path)]
            subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": ROOT})
            row = json.loads(path.read_text())
            rows.append({**row, "ratio": row["held_bytes"] / row["plan_bytes"]})
            print(row["model on"], row["zero"], f"{rows[-1]['ratio']:.3f}")
    save("resident", {"options": vars(o), "rows": rows})


if __name__ == "__main__":
    main()
