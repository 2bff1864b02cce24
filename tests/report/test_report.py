"""Reports: what stands in the page, that it is one file, and that a browser shows every view."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from models import GPT, token_batch, token_loss
from search.jobs import layers
from weft.cli.main import app
from weft.errors import UserError
from weft.report import Report, write_report
from weft.report.content import MOST_SLICES
from weft.report.page import page_of
from weft.traces.rows import RankTrace, Slice, StepSpan

CHROMIUM = shutil.which("chromium")


def data_in(page: str) -> list[dict[str, Any]]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    found: list[dict[str, Any]] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a program that has made a step."""
    path = tmp_path_factory.mktemp("report") / "pages" / "run.html"
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    with weft.local_world(2):
        program = weft.compile(
            *(model, token_loss, optimizer, token_batch(4)),
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
        )
        with pytest.raises(UserError, match="call step first"):
            program.report(path)
        program.step(token_batch(4))
        program.report(path)
        program.close()
    return path


def test_a_run(ran: Path) -> None:
    page = ran.read_text()
    assert not re.search(r'(src|href)="|https?://(?!www\.w3\.org)', page)  # it needs nothing else
    (data,) = data_in(page)
    assert "GPT" in data["title"]
    assert any("strategy" in line for line in data["notes"])
    assert [(each["group"], each["rank"]) for each in data["timelines"]] == [
        *(("measured", rank) for rank in (0, 1)),
        ("predicted", 0),
    ]
    for each in data["timelines"]:
        assert each["slices"]
        assert all(
            took >= 0 and 0 <= place < len(each["queues"]) for place, _, took, *_ in each["slices"]
        )
        if each["group"] == "measured":
            assert max(size for _, size in each["levels"]) > 0
    (head,) = [row for row in data["model"] if row["path"] == "head.weight"]
    assert (head["role"], head["grid"], head["ranks"]) == ("parameter", [2], [0, 1])
    assert head["layout"][0].startswith("S(")
    assert any(row["role"] == "module" and row["ops"] and row["lines"] for row in data["model"])


def test_a_simulation_and_a_search(tmp_path: Path) -> None:
    graph, page = tmp_path / "layers.graph", tmp_path / "page.html"
    layers().save(graph)
    command = ["simulate", str(graph), "--topology", "h100x4", "--report", str(page)]
    assert CliRunner().invoke(app, command).exit_code == 0
    (data,) = data_in(page.read_text())
    assert data["summary"]["ranks"]
    assert data["search"] == {}
    command = ["search", str(graph), "--topology", "h100x4", "--moves", "12", "--report", str(page)]
    assert CliRunner().invoke(app, command).exit_code == 0
    (data,) = data_in(page.read_text())
    tried = data["search"]["tried"]
    assert [each["outcome"] for each in tried].count("best") == 1
    assert data["search"]["seconds"] == min(
        x["seconds"] for x in tried if x["outcome"] != "does not fit" and x["seconds"]
    )
    assert "weft_strategy" in data["search"]["best"]


def test_what_ends_a_script_does_not(tmp_path: Path) -> None:
    report = Report("</script><b>&", notes=["<!-- {{script}} \u2028"])
    page = page_of([report])
    (data,) = data_in(page)
    assert (data["title"], data["notes"]) == ("</script><b>&", ["<!-- {{script}} \u2028"])
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;</title>" in page
    assert (
        write_report(tmp_path / "a" / "b.html", report, report).read_text().count("</script>") == 2
    )


def test_many_short_acts_are_joined() -> None:
    slices = tuple(
        Slice("compute", f"act {n}", "compute", 1000 * n, 1000 * n + 900, {}) for n in range(50_000)
    )
    trace = RankTrace(0, (("compute", ()),), (StepSpan(0, 0, 50_000_000),), slices)
    (line,) = Report("many", measured=[trace]).data()["timelines"]
    assert 1000 < len(line["slices"]) <= MOST_SLICES
    assert line["slices"][0][1] == 0
    begin, took = line["slices"][-1][1:3]
    assert begin + took == pytest.approx(49_999.9)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "shown"),
    [
        ("summary", ["Largest costs", "Critical path of a step", "strategy:"]),
        ("model", ["blocks", "Choose a module"]),
        ("time", ["<canvas", "whole step"]),
        ("memory", ["measured rank 1", "<canvas"]),
    ],
)
def test_a_browser_shows_it(view: str, shown: list[str], ran: Path) -> None:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [*map(str, command), f"file://{ran}#{view}"], capture_output=True, text=True, timeout=90
    )
    assert 'data-ready="yes"' in done.stdout
    main = done.stdout.split("<main>")[1].split("</main>")[0]
    for text in shown:
        assert text in main
