"""One rank of a job whose ranks are on hosts of their own, started by test_buddies.py.

    snapshots_on_processes.py train|alike|resume FOLDER ROOTS HOSTS OUT

FOLDER has the checkpoints, ROOTS a folder for each host, which stands for its memory; HOSTS are those of the ranks.
Tells what was loaded and warned of, and the losses of steps 5 and 6. The extras of ranks differ, but in mode alike.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

import weft
from program.saving.nets import Case, batch_of, loss_fn

if __name__ == "__main__":
    mode, folder, roots, hosts, out = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    root = Path(roots, f"host-{hosts[rank]}")
    root.mkdir(mode=0o700, exist_ok=True)
    os.environ["WEFT_SNAPSHOTS"] = str(root)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    model, optimizer = Case(seed=7 if mode == "resume" else 0).parts()
    program = weft.compile(
        *(model, loss_fn, optimizer, batch_of(0)),
        placement=weft.placement("cpu", list(range(size))),
        strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
        seed=3,
    )
    kept = weft.Checkpoints(folder, every=3, memory_every=1)
    found = kept.load_newest(program) or {}
    found = {name: int(each) for name, each in found.items()}
    began = program.steps
    while program.steps < 4:
        program.step(batch_of(program.steps))
        own = {} if mode == "alike" else {"rank": rank, "drawn": torch.tensor(10 * rank)}
        kept.save_when_due(program, {"step": program.steps, **own})
    program.wait_for_memory()
    losses = [float(program.step(batch_of(step))) for step in (4, 5)]
    sent = dict(program._snapshots[Path(folder)].shelf.line.channel.sent) if size > 1 else {}
    Path(out, f"{rank}.json").write_text(json.dumps([began, found, losses, told, sent]))
    if mode != "resume":
        os._exit(0)  # as if all were lost at once
    program.close()
