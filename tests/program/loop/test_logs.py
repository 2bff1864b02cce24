"""Logs of a loop that other packages write: opened by whoever writes, and by nobody else."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from errno import EACCES, ENOSPC
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft
from weft.errors import UserError


class Writer:
    """Stands for TensorBoard's writer and for a run of Weights & Biases; keeps what it is told."""

    opened: list[Writer]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.told: list[Any] = [(*arguments, options)]
        self.opened.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))

    def log(self, figures: dict[str, float], step: int) -> None:
        self.told += [(name, value, step) for name, value in figures.items()]

    def flush(self) -> None:
        """What was added is there for others."""

    def close(self) -> None:
        self.told.append("closed")

    def finish(self, exit_code: int) -> None:
        self.told.append("failed" if exit_code else "closed")


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    Writer.opened = []
    boards, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    vars(boards)["SummaryWriter"] = vars(wandb)["init"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", boards)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return Writer.opened


BOARDS = [
    (lambda: weft.logs.TensorBoard("runs"), lambda step: ("runs", {"purge_step": step + 1})),
    (lambda: weft.logs.WeightsAndBiases(project="gpt"), lambda step: ({"project": "gpt"},)),
]


@pytest.mark.parametrize(("make", "given"), BOARDS, ids=["TensorBoard", "WeightsAndBiases"])
def test_it_is_opened_by_the_first_figures(make: Any, given: Any, writers: list[Writer]) -> None:
    silent, log = make(), make()
    silent.close()
    assert not writers
    log.write(1, {"loss": 2.0})
    log.write(2, {"loss": 1.0})
    log.close()
    (writer,) = writers
    assert writer.told == [given(0), ("loss", 2.0, 1), ("loss", 1.0, 2), "closed"]


@pytest.mark.parametrize(("make", "given"), BOARDS, ids=["TensorBoard", "WeightsAndBiases"])
def test_a_second_loop_opens_it_again(make: Any, given: Any, writers: list[Writer]) -> None:
    log = make()
    for step in (0, 5):
        log.begin(step)
        log.write(step + 1, {"loss": 2.0})
        log.close()
        log.close()
    assert [each.told for each in writers] == [
        [given(0), ("loss", 2.0, 1), "closed"],
        [given(5), ("loss", 2.0, 6), "closed"],
    ]


def test_a_run_that_failed_is_told_apart(writers: list[Writer]) -> None:
    log = weft.logs.WeightsAndBiases()
    log.write(1, {})
    log.fail()
    log.close()
    assert writers[0].told[1:] == ["failed"]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            BOARDS[0][0],
            PermissionError(EACCES, "not yours"),
            "cannot write the log runs: not yours",
        ),
        (BOARDS[1][0], KeyError("no key"), "wandb.init fails with KeyError: 'no key'"),
    ],
    ids=["TensorBoard", "WeightsAndBiases"],
)
def test_what_cannot_be_opened_is_told(
    make: Any, error: Exception, text: str, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Writer, "__init__", fails)
    with pytest.raises(UserError, match=text):
        make().begin(0)


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


def test_a_table_gets_columns_as_figures_come(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = weft.logs.Csv(path)
    log.write(1, {"loss": 2.0})
    log.write(2, {"loss": 1.0, "held": 3.0})
    log.close()
    assert path.read_text().splitlines() == ["step,loss,held", "1,2.0,", "2,1.0,3.0"]
    again = weft.logs.Csv(path)
    again.write(3, {"held": 2.5})
    again.close()
    assert path.read_text().splitlines()[-1] == "3,,2.5"


def read(path: Path, kind: Any) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    if kind is weft.logs.JsonLines:
        return [json.loads(line) for line in lines]
    return [dict(row) for row in csv.DictReader(lines)]


@pytest.mark.parametrize("kind", [weft.logs.JsonLines, weft.logs.Csv])
def test_each_step_has_one_line(kind: Any, tmp_path: Path, caplog: Any) -> None:
    """Also after a restart from an earlier step, and where an evaluation comes later."""
    path = tmp_path / "log"
    for begun, loss in ((0, 1.0), (3, 2.0)):
        log = kind(path)
        log.begin(begun)
        if begun:  # an evaluation at the end of the run before was lost
            log.write(begun, {"held": 7.0})
        for step in range(begun + 1, begun + 4):
            log.write(step, {"loss": loss})
        log.write(step, {"held": 5.0})
        log.write(step + 1, {"held": 6.0})
        log.close()
        caplog.set_level("WARNING", "weft")
    found = read(path, kind)
    assert [int(row["step"]) for row in found] == [1, 2, 3, 4, 5, 6, 7]
    losses = [row.get("loss") or 0 for row in found]
    assert list(map(float, losses)) == [1, 1, 1, 2, 2, 2, 0]
    helds = [row.get("held") or 0 for row in found]
    assert list(map(float, helds)) == [0, 0, 7, 0, 0, 5, 6]
    assert "lines of steps after 3 are dropped (1)" in caplog.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("step,loss\n1,2.0,3.0,4.0\n", "line 2 has 4 cells, its header 2"),
        ("a,b\n1,2\n", r"its header \['a', 'b'\] has no column 'step'"),
        ("step,loss,loss\n1,2,3\n", "has a column twice"),
        ("\nstep,loss\n1,2\n", "begins with an empty line"),
        (b"step,loss\n1,\xff\n", "which is no CSV"),
        (b"\xff\xfe\n", "which is no CSV"),
    ],
    ids=["wider", "another", "twice", "blank", "bytes", "header"],
)
def test_tables_of_others_are_told_and_stay(content: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    log = weft.logs.Csv(path)
    for _ in range(2):
        with pytest.raises(UserError, match=why):
            log.write(5, {"held": 1.0})
    log.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", [weft.logs.JsonLines, weft.logs.Csv])
def test_a_figure_that_is_called_step_is_told(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps under the name 'step', and so has a figure"):
        kind(tmp_path / "log").write(1, {"step": 2.0})
    assert list(tmp_path.iterdir()) == []


def test_lines_go_into_a_pipe() -> None:
    reading, writing = os.pipe()
    log = weft.logs.JsonLines(f"/dev/fd/{writing}")
    log.begin(0)
    log.write(1, {"loss": 2.0})
    log.write(1, {"held": 3.0})
    log.close()
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert [json.loads(line)["step"] for line in lines] == [1, 1]


class Full(io.StringIO):
    """A file on a disk that has no room left."""

    def flush(self) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))


@pytest.mark.parametrize("kind", [weft.logs.JsonLines, weft.logs.Csv])
def test_a_full_disk_is_told(kind: Any, tmp_path: Path) -> None:
    log = kind(tmp_path / "log")
    log.write(1, {"loss": 2.0})
    log.close()
    log._columns, log._file._file = ["step", "loss"], Full()
    with pytest.raises(UserError, match="cannot write the log .*No space left"):
        log.write(2, {"loss": 1.0})


def test_the_newest_figures_are_gauges_of_prometheus(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "weft.prom"
    log = weft.logs.Prometheus(path, labels={"run": 'a "b"\\\n'})
    log.write(1, {"loss": 2.5, "held out/loss": math.inf})
    log.write(2, {"loss": 0.1, "peak": math.nan})
    log.close()
    labels = r'{run="a \"b\"\\\n"}'
    gauges = {"loss": "0.1", "held_out_loss": "+Inf", "step": "2.0", "peak": "NaN"}
    assert path.read_text() == "".join(
        f"# TYPE weft_{name} gauge\nweft_{name}{labels} {value}\n" for name, value in gauges.items()
    )


def test_prometheus_is_told_apart(tmp_path: Path) -> None:
    log = weft.logs.Prometheus(tmp_path / "weft.prom")
    log.write(1, {"a/b": 1.0})
    before = (tmp_path / "weft.prom").read_text()
    assert before.startswith("# TYPE weft_a_b gauge\nweft_a_b 1.0\n")
    with pytest.raises(weft.errors.UserError, match="'a/b' and 'a b' are both weft_a_b"):
        log.write(2, {"a b": 1.0})
    assert (tmp_path / "weft.prom").read_text() == before
    with pytest.raises(weft.errors.UserError, match="found '1a'"):
        weft.logs.Prometheus(tmp_path / "weft.prom", labels={"1a": ""})
    with pytest.raises(weft.errors.UserError, match="under the name 'step', and so has a figure"):
        log.write(2, {"step": 1.0})
    (tmp_path / "file").touch()
    with pytest.raises(weft.errors.UserError, match="cannot write the log"):
        weft.logs.Prometheus(tmp_path / "file" / "weft.prom").write(1, {})
