"""Logs of a loop that other packages write: opened by whoever writes, and by nobody else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft


class Writer:
    """Stands for TensorBoard's writer and for a run of Weights & Biases; keeps what it is told."""

    opened: list[Writer]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.told: list[Any] = [arguments or options]
        self.opened.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))

    def log(self, figures: dict[str, float], step: int) -> None:
        self.told += [(name, value, step) for name, value in figures.items()]

    def close(self) -> None:
        self.told.append("closed")

    finish = close


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    Writer.opened = []
    boards, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    vars(boards)["SummaryWriter"] = vars(wandb)["init"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", boards)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return Writer.opened


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: weft.logs.TensorBoard("runs"), ("runs",)),
        (lambda: weft.logs.WeightsAndBiases(project="gpt"), {"project": "gpt"}),
    ],
    ids=["TensorBoard", "WeightsAndBiases"],
)
def test_it_is_opened_by_the_first_figures(make: Any, given: Any, writers: list[Writer]) -> None:
    silent, log = make(), make()
    silent.close()
    assert not writers
    log.write(1, {"loss": 2.0})
    log.write(2, {"loss": 1.0})
    log.close()
    (writer,) = writers
    assert writer.told == [given, ("loss", 2.0, 1), ("loss", 1.0, 2), "closed"]


@pytest.mark.parametrize("kind", [weft.logs.JsonLines, weft.logs.Csv])
def test_a_line_that_was_cut_stays_alone(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "log"
    first, second = kind(path), kind(path)
    assert not path.parent.exists()  # nobody has written yet
    first.write(1, {"loss": 2.0})
    first.close()
    path.write_bytes(path.read_bytes()[:-4])
    cut = path.read_text()
    second.write(2, {"loss": 1.5})
    second.close()
    assert path.read_text().startswith(cut + "\n")
    assert "1.5" in path.read_text().splitlines()[-1]
