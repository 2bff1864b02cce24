"""Reports: what stands in the page, and that it is one file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from report.large import large_run
from report.reported import write_run
from search.jobs import layers
from weft.cli.main import app
from weft.errors import UserError
from weft.report import Report, write_report
from weft.report.content import MOST_SLICES, page_of
from weft.traces.rows import RankTrace, StepSpan


def data_in(page: str) -> list[dict[str, Any]]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def test_a_report_of_no_step_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with weft.local_world(1):
        program = weft.compile(
            *(model, lambda net, x: net(x).sum(), torch.optim.SGD(model.parameters())),
            torch.ones(2, 2),
            placement=weft.placement("cpu", [0]),
        )
        with pytest.raises(UserError, match="call step first"):
            program.report(tmp_path / "run.html")
        program.close()


def test_a_run(tmp_path: Path) -> None:
    path = tmp_path / "pages" / "run.html"
    write_run(path, steps=3)
    page = path.read_text()
    assert not re.search(r'(src|href)="|https?://(?!www\.w3\.org)', page)  # it needs nothing else
    (data,) = data_in(page)
    assert "GPT" in data["title"]
    assert any("strategy" in line for line in data["notes"])
    measured, predicted = data["time"]
    assert [(each["group"], each["ranks"]) for each in (measured, predicted)] == [
        *(("measured", 2), ("predicted", 1)),
    ]
    assert [number for number, *_ in measured["steps"]] == [0, 1, 2]
    assert set(measured["totals"]) == {"0", "1", "2"}
    assert data["summary"]["path"]
    processes = {
        event["args"]["name"]
        for event in data["trace"]["traceEvents"]
        if event["name"] == "process_name"
    }
    assert processes == {"measured rank 0", "measured rank 1", "predicted rank 0"}
    kinds = {(row["group"], row["rank"], row["step"]): row["kinds"] for row in data["memory"]}
    assert "activations" in kinds["measured", 0, 2]
    assert kinds["measured", 0, 0] == ["all kinds"]
    assert "activations" in kinds["predicted", 0, 3] if ("predicted", 0, 3) in kinds else True
    (head,) = [row for row in data["model"]["rows"] if row["path"] == "head.weight"]
    assert (head["role"], head["grid"], head["ranks"]) == ("parameter", [2], [[0, 1]])
    assert head["layout"][0].startswith("S(")
    assert data["sent"]["cells"]
    assert data["search"] == data["figures"] == {}


def test_a_simulation_and_a_search(tmp_path: Path) -> None:
    graph, page = tmp_path / "layers.graph", tmp_path / "page.html"
    layers().save(graph)
    command = ["simulate", str(graph), "--topology", "h100x4", "--report", str(page)]
    assert CliRunner().invoke(app, command).exit_code == 0
    (data,) = data_in(page.read_text())
    assert data["summary"]["ranks"]
    assert data["model"]["rows"]
    assert data["sent"]["cells"]
    assert data["memory"]
    assert data["search"] == {}
    command = ["search", str(graph), "--topology", "h100x4", "--moves", "12", "--report", str(page)]
    assert CliRunner().invoke(app, command).exit_code == 0
    (data,) = data_in(page.read_text())
    found = data["search"]
    assert [each["outcome"] for each in found["tried"]].count("best") == 1
    assert found["seconds"] == min(
        x["seconds"] for x in found["tried"] if x["outcome"] != "does not fit" and x["seconds"]
    )
    assert "weft_strategy" in found["best"]
    assert data["model"]["rows"]
    # What was looked at, in the order of time, until the best.
    assert len(found["course"]) >= len(found["tried"])
    after, chains, _, best, bounds = zip(*found["course"], strict=True)
    assert list(after) == sorted(after)
    assert set(chains) == set(range(len(found["chains"])))
    so_far = [each for each in best if each is not None]
    assert so_far == sorted(so_far, reverse=True)
    assert so_far[-1] == pytest.approx(found["seconds"])
    assert all(each is None or each <= so_far[-1] for each in bounds)


def test_what_ends_a_script_does_not(tmp_path: Path) -> None:
    report = Report("</script><b>&", notes=["<!-- {{script}} \u2028"])
    page = page_of([report.data()])
    (data,) = data_in(page)
    assert (data["title"], data["notes"]) == ("</script><b>&", ["<!-- {{script}} \u2028"])
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;</title>" in page
    assert (
        write_report(tmp_path / "a" / "b.html", report, report).read_text().count("</script>") == 2
    )


def test_what_is_not_finite_is_null() -> None:
    """JSON has no word for it, and a browser would read nothing of the page."""
    report = Report("run", figures={"loss": ([1, 2, 3], [1.0, float("nan"), float("inf")])})
    (data,) = data_in(page_of([report.data()]))
    assert data["figures"] == {"loss": [[1, 2, 3], [1.0, None, None]]}


def test_an_empty_report() -> None:
    report = Report("empty", measured=[RankTrace(0, (), (StepSpan(0, 0, 1),), ())])
    (data,) = data_in(page_of([report.data()]))
    assert data["memory"] == []


def test_timelines_of_many_acts_are_left_out() -> None:
    small, large = (large_run(ranks=1, acts=acts).data() for acts in (MOST_SLICES, MOST_SLICES + 1))
    assert len(small["trace"]["traceEvents"]) > MOST_SLICES
    assert large["trace"] == {}
    assert large["time"][0]["totals"]
