"""Pages and folders of runs are read back, and stand side by side."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from mutations import mutated
from weft.cli.main import app
from weft.errors import UserError
from weft.report import Report, write_report
from weft.report.runs import reports_of, traces_in
from weft.traces.events import trace_content
from weft.traces.rows import Level, RankTrace, Slice, StepSpan
from weft.units import Bytes

TRACE = RankTrace(
    1,
    (("compute", ()), ("comm:0", (0, 1))),
    (StepSpan(4, 1000, 9000),),
    (
        Slice("compute", "forward", "compute", 1000, 5000, {"step": 4, "actor": 2}),
        Slice("comm:0", "all_reduce x", "communication", 4000, 9000, {"step": 4}),
        Slice("comm:0", "waits", "wait", 4000, 4500, {"rank": 0}),
    ),
    (),
    (Level(1000, Bytes(10)), Level(9000, Bytes(20))),
    (StepSpan(4, 200, 900),),
)


def run(folder: Path) -> Path:
    """The folder of a run with a page, a timeline, logs, and files that are none of these."""
    folder.mkdir()
    write_report(folder / "page.html", Report("a run", notes=["mine"], measured=[TRACE]))
    content = trace_content([TRACE])
    (folder / "step.json").write_text(json.dumps(content))
    (folder / "config.json").write_text("[1, 2")
    (folder / "notes.html").write_text("<p>notes</p>")
    (folder / "table.jsonl").write_text('{"a": 1, "b": 2}\n')
    lines = weft.logs.JsonLines(folder / "log.jsonl")
    lines.write(1, {"loss": 2.0})
    lines.write(2, {"loss": float("nan"), "held": 3.0})
    lines.write(5, {"rate": 0.1})
    lines.close()
    (folder / "step-00000001").mkdir()
    return folder


def test_a_folder(tmp_path: Path) -> None:
    page, traced = reports_of([run(tmp_path / "one")])
    assert (page["title"], page["notes"]) == ("one: a run", ["mine"])
    assert page["figures"] == {
        "loss": [[1], [2.0]],
        "held": [[2], [3.0]],
        "rate": [[5], [0.1]],
    }
    assert traced["title"] == "one: step"
    assert traced["time"] == page["time"]
    assert traced["trace"] == page["trace"] == trace_content([TRACE])
    assert traced["memory"] == page["memory"] != []


def test_steps_that_were_made_again_count_as_made_last(tmp_path: Path) -> None:
    rows: list[str] = []
    for first in (1, 3):  # killed after step 4, and gone on from the checkpoint of step 2
        steps = range(first, 5 if first == 1 else 6)
        rows += [json.dumps({"step": step, "loss": 10.0 * first + step}) for step in steps]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    (page,) = reports_of([tmp_path])
    assert page["figures"] == {"loss": [[1, 2, 3, 4, 5], [11.0, 12.0, 33.0, 34.0, 35.0]]}


def test_a_page_in_its_own_folder_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run(tmp_path / "one"))
    for _ in range(2):
        done = CliRunner().invoke(app, ["report", ".", "-o", "all.html"])
        assert done.output.splitlines()[1:] == ["  one: a run", "  one: step"]


def test_a_timeline_comes_back() -> None:
    found = traces_in(json.loads(json.dumps(trace_content([TRACE], [TRACE]))))
    expected = TRACE.moved(1000)
    assert set(found) == {"measured", "predicted"}
    for (trace,) in found.values():
        assert (trace.rank, trace.queues, trace.steps) == (1, expected.queues, expected.steps)
        assert trace.slices == expected.slices
        assert trace.data == expected.data
        assert trace.levels == expected.levels


def test_several_stand_side_by_side(tmp_path: Path) -> None:
    one, other = run(tmp_path / "one"), tmp_path / "two.html"
    write_report(other, Report("another"))
    page = tmp_path / "both" / "both.html"
    done = CliRunner().invoke(app, ["report", str(one), str(other), "-o", str(page)])
    assert done.exit_code == 0
    assert "one: a run" in done.output
    again = reports_of([page])
    assert [each["title"] for each in again] == ["one: a run", "one: step", "another"]
    assert again == reports_of([one, other])


def test_a_trace_of_a_program(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    x = torch.ones(4, 4)
    with weft.local_world(2):
        program = weft.compile(
            *(model, lambda net, x: net(x).square().mean(), torch.optim.SGD(model.parameters()), x),
            placement=weft.placement("cpu", [0, 1]),
        )
        program.step(x)
        program.trace(tmp_path / "step.json", predicted=True)
        program.close()
    (found,) = reports_of([tmp_path])
    assert [each["group"] for each in found["time"]] == ["measured", "predicted"]
    assert found["time"][0]["ranks"] == 2
    assert found["memory"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.html", "<p>hello</p>", "is not a report of weft"),
        ("a.html", '<script type="application/json" id="data">[{</script>', "is damaged"),
        ("a.html", '<script type="application/json" id="data">[1]</script>', "is damaged"),
        ("a.html", '<script type="application/json" id="data">[]</script>', "got none"),
        (
            "a.html",
            '<script type="application/json" id="data">[{"format": 9, "title": "x"}]</script>',
            "expected format 2, got 9",
        ),
        ("run/log.jsonl", '{"step": 1, "loss": "low"}', r"is not a log of weft\.fit \(ValueError"),
        ("run/log.jsonl", "[1]\n", r"log\.jsonl is not a log"),
        ("run/log.jsonl", '{"step": {}}\n', r"log\.jsonl is not a log"),
        ("run/step.json", '{"traceEvents": [{"ph": "X"}]}', r"step\.json is not a timeline"),
        ("run/step.json", '{"traceEvents": ', r"step\.json is not a timeline"),
        ("run/other.txt", "x", "has no report, trace or log"),
        ("run/log.jsonl", b"\xff\xfe", r"cannot read the log .*log\.jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, content: Any, why: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(content if isinstance(content, bytes) else content.encode())
    asked = place if place.parent == tmp_path else place.parent
    with pytest.raises(UserError, match=why):
        reports_of([asked])
    done = CliRunner().invoke(app, ["report", str(asked), "-o", str(tmp_path / "out.html")])
    assert done.exit_code == 2
    assert not (tmp_path / "out.html").exists()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the report .*No such file"):
        reports_of([tmp_path / "none.html"])


def test_timelines_with_mistakes_are_read_or_told(tmp_path: Path) -> None:
    text = json.dumps(trace_content([TRACE]), indent=1)
    refused = 0
    for broken in mutated(text, 200):
        (tmp_path / "step.json").write_text(broken)
        try:
            reports_of([tmp_path])
        except UserError:
            refused += 1
    assert 50 < refused < 200


def test_pages_with_mistakes_are_read_or_told(tmp_path: Path) -> None:
    page = write_report(tmp_path / "a.html", Report("a run", measured=[TRACE])).read_text()
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.S)
    draw, told = random.Random(0), 0
    for _ in range(50):
        cut = draw.randrange(len(text))
        (tmp_path / "a.html").write_text(page.replace(text, text[:cut]))
        with pytest.raises(UserError, match=r"a\.html"):
            reports_of([tmp_path / "a.html"])
        told += 1
    assert told == 50
