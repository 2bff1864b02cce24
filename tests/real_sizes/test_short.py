"""The short form of the gate: what it plans is as the textbook says, but for what is known to be open."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

from tools.real_sizes.__main__ import main
from tools.real_sizes.page import line_of, page_of
from tools.real_sizes.plans import KINDS
from tools.real_sizes.rows import FAMILIES, all_rows, short_rows
from tools.real_sizes.run import Result, Sized, results
from tools.scores.stamp import stamp_now
from weft.errors import StrategyError

# Rows that fail, by family and strategy, with the quantities in which they do. Mended ones must be taken out.
OPEN: dict[tuple[str, str], set[str]] = {}


@pytest.fixture(scope="module")
def short() -> list[Result]:
    return list(results(short_rows()))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_short_form_is_as_the_textbook_says(short: list[Result]) -> None:
    assert not [line_of(result) for result in short if result.error]
    failing = {
        (result.row.family, result.row.kind): {
            check.quantity for check in result.checks if check.verdict == "FAIL"
        }
        for result in short
        if result.fails
    }
    assert failing == OPEN, "\n".join(line_of(result) for result in short if result.fails)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_holds_every_row() -> None:
    families, kinds = ("GPT-2 XL", "DLRM"), ("data", "ZeRO 3", "tables")
    rows = [row for row in short_rows() if row.family in families and row.kind in kinds]
    found = list(results(rows))
    page = page_of(found, stamp_now("it", ["tools/real_sizes"]))
    assert len(found) == 3
    for result in found:
        assert f"| {result.row.kind} | {'×'.join(map(str, result.row.grid))} |" in page


def test_every_row_is_planned_once_and_every_strategy_somewhere() -> None:
    rows = all_rows()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.kind for row in rows} == set(KINDS)
    assert {row.family for row in rows} == set(FAMILIES)
    assert {row.shape.precision for row in rows} == {"fp32", "bf16", "pure bf16"}


def test_an_error_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*told: object) -> None:
        raise StrategyError("no such layout")

    monkeypatch.setattr(Sized, "of", refused)
    assert main(["--short", "--only", "*DLRM*", "--page", str(tmp_path / "page.md")]) == 1
    assert "| **StrategyError** |" in (tmp_path / "page.md").read_text()


def test_a_pattern_that_names_no_row_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--short", "--only", "nothing"]) == 1
    assert "0 of 0" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
def test_an_expanded_mask_that_is_cut_counts_as_what_it_looks_at() -> None:
    """Each micro-batch's part of it, of which nobody knows whether it is a view, once counted as the whole: 3 times."""
    name = "DeBERTa-v3-large, 12 layers, 32 × 512, fp32: pipeline on 4×2"
    (row,) = [each for each in all_rows() if each.name == name]
    (result,) = results([row])
    (peak,) = [check for check in result.checks if check.quantity == "peak"]
    assert peak.verdict != "FAIL"
