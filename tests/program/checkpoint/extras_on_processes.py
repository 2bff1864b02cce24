"""Ranks whose extras differ, started by test_extras_of_processes.py.

    extras_on_processes.py save|load|other FOLDER OUT

FOLDER has a checkpoint of each way to save. Tells what comes back of each; "other" what is refused.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

import weft
from weft.errors import WeftError


class Place:
    """Where a process stands in its own part of the data."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counting(nn.Module):
    """Keeps a number that is the rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 1), 10 + rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def program_of(model: nn.Module, size: int) -> tuple[weft.Program, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    place = weft.placement("cpu", range(size))
    return weft.compile(model, loss_fn, optimizer, torch.ones(6, 4), placement=place), optimizer


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except WeftError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saved(rank: int, size: int, folder: Path) -> list[Any]:
    """Save in each way; then what is refused."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    model = Counting(rank)
    program, optimizer = program_of(model, size)
    program.step(torch.ones(6, 4))
    generator = torch.Generator().manual_seed(rank)
    alike = {"alike": [1.5, torch.arange(3)], "names": {"b", "a", "c", "d"}}
    own = {"place": Place(100 + rank), "random": generator.get_state()}
    of_one = {"of the first": 3} if rank == 0 else {"of the second": torch.tensor([4])}
    program.save(folder / "saved", {**alike, **own, **of_one})
    program.save(folder / "beside", {**alike, **own, **of_one}, wait=False)
    checkpoints = weft.Checkpoints(folder / "kept")
    checkpoints.save(program, {**alike, **own, **of_one}, score=2.0 + rank)
    model.calls = 5
    program.save(folder / "alike", alike)
    # What differs otherwise is told.
    state = optimizer.state[model.inner.weight]
    state["kept"] = rank
    refused = [told(lambda: program.save(folder / "refused"))]
    state["kept"] = 1
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    refused += [told(lambda: program.save(folder / "refused"))]
    assert not (folder / "refused").exists()
    return [warned, refused]


def loaded(rank: int, size: int, folder: Path) -> list[Any]:
    """All that comes back, of each way."""
    found: list[Any] = []
    checkpoints = weft.Checkpoints(folder / "kept")
    for name in ("saved", "beside", "kept", "alike"):
        model, place = Counting(0), Place(0)
        program, _ = program_of(model, size)
        given = {} if name == "alike" else {"place": place}
        newest = name == "kept"
        extra = (
            checkpoints.load_newest(program, given)
            if newest
            else program.load(folder / name, given)
        )
        assert extra is not None
        assert torch.equal(extra["alike"][1], torch.arange(3))
        assert extra["names"] == {"a", "b", "c", "d"}
        if given:
            generator = torch.Generator().manual_seed(rank)
            assert torch.equal(extra["random"], generator.get_state())
        second = extra["of the second"].tolist() if "of the second" in extra else None
        found.append([place.at, model.calls, extra.get("of the first"), second, extra.get("score")])
        program.close()
    return found


def others(rank: int, size: int, folder: Path) -> list[Any]:
    """As many ranks as nobody saved."""
    program, _ = program_of(Counting(0), size)
    before = program.steps
    refused = [told(lambda: program.load(folder / "saved"))]
    refused += [told(lambda: weft.Checkpoints(folder / "kept").load_newest(program))]
    assert program.steps == before
    extra = program.load(folder / "alike")
    assert torch.equal(extra["alike"][1], torch.arange(3))
    assert program.load(folder / "saved", model_only=True) == {}
    return refused


if __name__ == "__main__":
    mode, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made = {"save": saved, "load": loaded, "other": others}[mode](rank, size, folder)
    (out / f"{mode}-{rank}.json").write_text(json.dumps(made))
