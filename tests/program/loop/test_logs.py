"""A log of a loop as lines of JSON: one for each step, whatever happens to the run."""

from __future__ import annotations

import io
import json
import os
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.errors import UserError


def test_a_line_that_was_cut_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "log"
    first, second = weft.logs.JsonLines(path), weft.logs.JsonLines(path)
    assert not path.parent.exists()  # nobody has written yet
    first.write(1, {"loss": 2.0})
    first.close()
    path.write_bytes(path.read_bytes()[:-4])
    cut = path.read_text()
    second.write(2, {"loss": 1.5})
    second.close()
    assert path.read_text().startswith(cut + "\n")
    assert "1.5" in path.read_text().splitlines()[-1]


def test_each_step_has_one_line(tmp_path: Path, caplog: Any) -> None:
    """Also after a restart from an earlier step, and where an evaluation comes later."""
    path = tmp_path / "log"
    for begun, loss in ((0, 1.0), (3, 2.0)):
        log = weft.logs.JsonLines(path)
        log.begin(begun)
        if begun:  # an evaluation at the end of the run before was lost
            log.write(begun, {"held": 7.0})
        for step in range(begun + 1, begun + 4):
            log.write(step, {"loss": loss})
        log.write(step, {"held": 5.0})
        log.write(step + 1, {"held": 6.0})
        log.close()
        caplog.set_level("WARNING", "weft")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.get("loss", 0) for row in found] == [1, 1, 1, 2, 2, 2, 0]
    assert [row.get("held", 0) for row in found] == [0, 0, 7, 0, 0, 5, 6]
    assert "lines of steps after 3 are dropped (1)" in caplog.text


def test_a_log_that_is_closed_goes_on(tmp_path: Path) -> None:
    log = weft.logs.JsonLines(tmp_path / "log")
    for step, name in ((1, "loss"), (1, "held"), (2, "loss")):
        log.write(step, {name: 1.0})
        log.close()
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert found == [{"step": 1, "loss": 1.0, "held": 1.0}, {"step": 2, "loss": 1.0}]


def test_what_is_no_text_is_told_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="cannot continue with the log .*, which is not JSON"):
        weft.logs.JsonLines(path).write(5, {"held": 1.0})
    assert path.read_bytes() == b"\xff\xfe\n"


def test_a_figure_that_is_called_step_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps under the name 'step', and so has a figure"):
        weft.logs.JsonLines(tmp_path / "log").write(1, {"step": 2.0})
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


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    log = weft.logs.JsonLines(tmp_path / "log")
    log.write(1, {"loss": 2.0})
    log.close()
    log._file = Full()
    with pytest.raises(UserError, match="cannot write the log .*No space left"):
        log.write(2, {"loss": 1.0})
