"""The page in a browser: every view is opened, clicked and photographed, in light, in dark and in a narrow window."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import weft
from report.large import large_run
from report.reported import write_run
from search.jobs import decoder
from weft.cli.main import app
from weft.report import Report, write_report
from weft.report.runs import reports_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="there is no Playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
# Milliseconds after which a page that does not do what is expected fails.
PATIENCE = 20_000
VIEWS = ("summary", "model", "time", "memory", "bytes", "search", "run")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of three steps with stages, a search, and both side by side with a log."""
    folder = tmp_path_factory.mktemp("pages")
    runs = folder / "run"
    runs.mkdir()
    write_run(runs / "page.html", steps=3, recompute=["blocks.1"])
    log = weft.logs.JsonLines(runs / "log.jsonl")
    for step in range(40):
        log.write(step, {"loss": 3.0 * 0.95**step, **({"held": 2.0} if step % 10 == 9 else {})})
    log.close()
    graph, search = folder / "decoder.graph", folder / "search.html"
    decoder().save(graph)
    command = [
        "search",
        str(graph),
        "--topology",
        "h100x4",
        "--moves",
        "60",
        "--report",
        str(search),
    ]
    assert CliRunner().invoke(app, command).exit_code == 0
    both = folder / "both.html"
    command = ["report", str(runs), str(search), "-o", str(both)]
    assert CliRunner().invoke(app, command).exit_code == 0
    return {"run": runs / "page.html", "search": search, "both": both}


@pytest.fixture
def opened(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens pages; whatever a page says against itself fails the test."""
    made, told = [], list[str]()

    def open_page(path: Path, view: str = "", **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        context = browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("console", lambda said: told.append(said.text) if said.type == "error" else None)
        page.on(
            "request",
            lambda asked: None if asked.url.startswith("file:") else told.append(asked.url),
        )
        made.append(context)
        page.goto(f"file://{path}#{view}")
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    yield open_page
    for context in made:
        context.close()
    assert told == []


def photo(page: Any, path: Path) -> bytes:
    """A picture of the whole page, after two frames."""
    page.evaluate("() => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")
    data: bytes = page.screenshot(path=str(path), full_page=True)
    return data


def shades(page: Any, canvas: str) -> int:
    """The number of colors in a canvas: of one that nothing is drawn on, one."""
    found: int = page.evaluate(
        """(name) => {
          const canvas = document.querySelector(name);
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const found = new Set();
          for (let n = 0; n < data.length; n += 4) found.add((data[n] << 16) | (data[n + 1] << 8) | data[n + 2]);
          return found.size;
        }""",
        canvas,
    )
    return found


@pytest.mark.parametrize(
    "look",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"color_scheme": "light", "viewport": {"width": 420, "height": 800}},
    ],
    ids=["light", "dark", "narrow"],
)
def test_every_view_of_every_page(
    look: dict[str, Any], pages: dict[str, Path], opened: Any, tmp_path: Path
) -> None:
    for name, path in pages.items():
        page = opened(path, **look)
        tabs = page.locator("nav button").all_inner_texts()
        wanted = {"run": VIEWS[:5], "search": (*VIEWS[:6],), "both": VIEWS}[name]
        assert [each.lower() for each in tabs] == list(wanted)
        for tab in tabs:
            page.get_by_role("tab", name=tab).click()
            assert page.url.endswith(f"#{tab.lower()}")
            section = page.locator(f"#view-{tab.lower()}")
            assert section.is_visible()
            picture = photo(page, tmp_path / f"{name}-{tab}.png")
            assert len(picture) > 5_000
            for number in range(section.locator("canvas").count()):
                section.locator("canvas").nth(number).evaluate("(x) => { x.id = 'looked-at'; }")
                assert shades(page, "#looked-at") > 1, (name, tab, number)
                section.locator("canvas").nth(number).evaluate("(x) => { x.id = ''; }")
            # Nothing is wider than the window but what scrolls by itself.
            wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (name, tab, wide)


def test_the_model(pages: dict[str, Path], opened: Any, tmp_path: Path) -> None:
    page = opened(pages["run"], "model")
    page.locator("summary", has_text="blocks").first.click()
    page.locator("summary", has_text="blocks").first.click()
    assert page.locator(".tag", has_text="ZeRO 3").count() > 0
    assert page.locator(".tag", has_text="recompute").count() > 0
    page.locator(".leaf", has_text="weight").first.click()
    side = page.locator(".chosenside")
    assert "parameter float32[17, 16]" in side.inner_text()
    assert "state exp_avg" in side.inner_text()
    assert "ZeRO 3, as the strategy says" in side.inner_text()
    page.evaluate(
        "() => document.querySelectorAll('.tree details').forEach((x) => { x.open = true; })"
    )
    page.locator("summary:has(b:text-is('up'))").first.click()
    rows = side.locator("tr.click")
    rows.first.wait_for()
    assert "made again" in side.inner_text() or rows.count() > 0
    rows.filter(has_text="mm").first.click()
    assert "against the chosen" in side.inner_text()
    assert side.locator("tr.best").count() == 1
    photo(page, tmp_path / "model.png")


def test_two_side_by_side(pages: dict[str, Path], opened: Any, tmp_path: Path) -> None:
    both = tmp_path / "two.html"
    command = ["report", str(pages["run"]), str(pages["search"]), "-o", str(both)]
    assert CliRunner().invoke(app, command).exit_code == 0
    page = opened(both, "summary")
    summary = page.locator("#view-summary")
    table = summary.locator("table").first
    assert "second against first" in table.inner_text()
    row = table.locator("tr", has_text="a step, predicted").inner_text()
    assert "%" in row
    said = summary.inner_text()
    assert "fullest rank, predicted" in said
    assert "fullest rank, in the order measured" in said
    assert page.locator(".side > div").count() == 2
    page.locator("summary", has_text="Parameters that lie otherwise").click()
    assert "head.weight" in summary.inner_text()


def test_the_keyboard(pages: dict[str, Path], opened: Any) -> None:
    page = opened(pages["run"], "summary")
    page.locator("nav button[aria-selected=true]").focus()
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("#model")
    page.locator(".leaf").first.focus()
    page.keyboard.press("Enter")
    assert page.locator(".leaf.chosen").count() == 1


def test_time(pages: dict[str, Path], opened: Any) -> None:
    page = opened(pages["run"], "time")
    heads = page.locator("h2", has_text="Totals by cause, measured")
    assert "step 2" in heads.inner_text()
    slider = page.locator("#view-time input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert "step 1" in heads.inner_text()
    assert "step 1," in page.locator("#view-time output").inner_text()
    page.get_by_role("button", name="all steps").click()
    assert "all 3 steps" in page.locator("#view-time output").inner_text()


def test_the_timeline_is_saved(pages: dict[str, Path], opened: Any, tmp_path: Path) -> None:
    page = opened(pages["run"], "time")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="save the timeline").click()
    waiting.value.save_as(tmp_path / "timeline.json")
    (report,) = reports_of([tmp_path])
    assert [each["group"] for each in report["time"]] == ["measured", "predicted"]


def test_shares_add_up_to_the_step(pages: dict[str, Path], opened: Any) -> None:
    page = opened(pages["run"], "time")
    told = page.locator("#view-time p", has_text="hidden communication of").all_inner_texts()
    assert len(told) == 2  # measured and predicted
    for said in told:
        parts = [float(each) for each in re.findall(r"([\d.]+) %", said)]
        assert len(parts) == 3
        assert abs(sum(parts) - 100) < 0.2


def test_memory_bytes_and_tables(pages: dict[str, Path], opened: Any, tmp_path: Path) -> None:
    page = opened(pages["run"], "memory")
    assert page.locator("#view-memory td", has_text="models.py").count() > 0
    chart = page.locator("#view-memory canvas[aria-label*='rank 0']").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert "activations" in page.locator("#tip").inner_text()
    page.get_by_role("tab", name="Bytes").click()
    matrix = page.locator("#view-bytes canvas").first
    before = photo(page, tmp_path / "bytes.png")
    matrix.click(position={"x": 84 + 40, "y": 35})
    assert "rank 0 sends rank 1" in page.locator("#view-bytes").inner_text()
    for box in page.locator("#view-bytes input[type=checkbox]").all():
        box.uncheck()
    assert photo(page, tmp_path / "none.png") != before
    # A click on the head of a column sorts.
    page.get_by_role("tab", name="Summary").click()
    head = page.locator("#view-summary th", has_text="times").first
    head.click()
    assert head.get_attribute("aria-sort") == "ascending"
    table = page.locator("#view-summary table", has_text="times").first
    place = table.locator("th").all_inner_texts().index("times")
    numbers = [
        int(row.locator("td").nth(place).inner_text()) for row in table.locator("tbody tr").all()
    ]
    assert numbers == sorted(numbers)


def test_a_thousand_ranks_and_a_million_acts_open_in_seconds(
    opened: Any, tmp_path: Path, record_property: Any
) -> None:
    path = write_report(tmp_path / "large.html", large_run(ranks=1000, acts=1000))
    page = opened(path, "time")
    page.evaluate("() => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")
    took = page.evaluate("() => performance.now()")
    record_property("milliseconds", took)
    assert took < 3_000
    assert "ui.perfetto.dev" in page.locator("#view-time").inner_text()
    for tab in page.locator("nav button").all_inner_texts():
        begin = page.evaluate("() => performance.now()")
        page.get_by_role("tab", name=tab).click()
        photo(page, tmp_path / f"large-{tab}.png")
        assert page.evaluate("() => performance.now()") - begin < 3_000, tab
    # The choice of ranks says which are shown.
    memory, chosen = page.locator("#view-memory"), page.get_by_label("rank", exact=True)
    assert chosen.locator("option:checked").inner_text() == "the fullest"
    assert memory.locator("h2").all_inner_texts()[0].startswith("measured rank 999")
    for choice, rank in (("measured rank 0", 0), ("the fullest", 999)):
        chosen.select_option(label=choice)
        assert memory.locator("h2").all_inner_texts()[0].startswith(f"measured rank {rank},")


def test_an_empty_page_says_so(opened: Any, tmp_path: Path) -> None:
    page = opened(write_report(tmp_path / "empty.html", Report("nothing")))
    assert "There is nothing in this report" in page.locator("main").inner_text()


def test_texts_of_axes_and_times(opened: Any, tmp_path: Path) -> None:
    page = opened(write_report(tmp_path / "empty.html", Report("nothing")))
    said = page.evaluate("() => [4e-8, 1e-12, 0.9999999, -2e-3, 0, null].map(seconds)")
    assert said == ["40.0 ns", "0", "1.000 s", "-2.000 ms", "0", ""]
    # Steps are whole: none is said twice.
    assert page.evaluate("() => marks(0, 3, 10, 1)") == [[0, 1, 2, 3], 1]
    axis = "([low, top, axis]) => { const [at, apart] = marks(low, top, 5); return at.map(eval(axis)(apart, top)); }"
    for (low, top, kind), texts in (
        ((0, 0.04, "timeAxis"), ["0 ms", "10 ms", "20 ms", "30 ms", "40 ms"]),
        ((0, 2e-5, "timeAxis"), ["0 µs", "5 µs", "10 µs", "15 µs", "20 µs"]),
        ((2.0001, 2.0004, "numberAxis"), ["2.0001", "2.0002", "2.0003", "2.0004"]),
        ((0, 2e9, "numberAxis"), ["0", "5e+8", "1.0e+9", "1.5e+9", "2.0e+9"]),
    ):
        found = page.evaluate(axis, [low, top, kind])
        assert found == texts
    # Each letter is 10 wide: the second text would lie over the first, the last one would be cut off.
    drawn = page.evaluate(
        """() => {
          const found = [], measureText = (text) => ({ width: 10 * text.length });
          const context = { measureText, fillText: (...own) => found.push(own) };
          markTexts(context, [[0, "first"], [30, "over"], [100, "last"]], 9, 0, 130);
          return found;
        }"""
    )
    assert drawn == [["first", 3, 9], ["last", 88, 9]]


def test_what_is_not_known_is_sorted_last(opened: Any, tmp_path: Path) -> None:
    page = opened(write_report(tmp_path / "empty.html", Report("nothing")))
    rows = page.evaluate(
        """() => {
          const made = table([["b"], [null], ["a"]], [["name", (row) => row[0]]]), head = made.querySelector("th");
          const said = () => [...made.querySelectorAll("td")].map((each) => each.textContent);
          head.click(); const up = said(); head.click();
          return [up, said()];
        }"""
    )
    assert rows == [["a", "b", ""], ["b", "a", ""]]


def test_reports_of_the_same_page(pages: dict[str, Path]) -> None:
    assert len(reports_of([pages["both"]])) == 2
