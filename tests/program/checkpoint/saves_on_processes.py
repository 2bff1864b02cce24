"""One rank of a job that saves or loads, started by test_processes.py: tells the losses of two steps."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from program.checkpoint.nets import Case, batch_of, loss_fn

LAYOUTS = {
    "zero": {"zero": weft.Zero(3)},
    "data": {},
    "stages": {
        "stages": (
            weft.Stage(("embedding", "head", "unused"), weft.placement("cpu", [0])),
            weft.Stage(("first", "norm", "last", "dropout"), weft.placement("cpu", [1])),
        ),
    },
}


def fail(program: weft.Program, folder: str, rank: int, beside: bool) -> str:
    """Save where one process cannot write; the error that this one is told."""
    if rank == 1:
        module: Any = import_module("weft.program.checkpoint.save")

        def full(*_: object) -> None:
            raise weft.errors.UserError("cannot write shard: No space left on device")

        module.write_file = full
    try:
        program.save(folder, wait=not beside)
        # A later one tells all what has failed on any.
        program.save(f"{folder} again")
    except weft.errors.UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    mode, layout, folder, out, beside = *sys.argv[1:5], len(sys.argv) > 5
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, optimizer = Case(seed=0 if mode == "save" else 7).parts()
    program = weft.compile(
        *(model, loss_fn, optimizer, batch_of(0)),
        placement=weft.placement("cpu", list(range(size))),
        strategy=weft.Strategy(batch={"*": weft.split(0)}, **LAYOUTS[layout]),
        seed=3,
    )
    if mode == "save":
        for step in range(2):
            program.step(batch_of(step))
        told = ""
        if layout == "data":
            told = fail(program, folder, rank, beside)
        else:
            program.save(folder, {"saved": 2}, wait=not beside)
    else:
        told = str(program.load(folder).get("saved"))
    program.wait_for_saved()
    losses = [float(program.step(batch_of(step))) for step in (2, 3)]
    Path(out, f"{rank}.json").write_text(json.dumps([losses, told, program.steps]))
