"""docs/models.md: rows that are not compared again stay, and the count is right."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

from tools.model_cases import Difference, settings
from tools.models import PAGE, cases, cell_of, page_of, rows_of


def test_rows_survive_a_page() -> None:
    columns = list(settings({}))
    rows = {"llama": ["1e-15"] * 7, "nmt": ["1e-15"] * 6 + ["**LayoutError**"]}
    page = page_of(rows, columns)
    assert rows_of(page) == rows
    assert "Equal: 13 of 14." in page


def test_a_difference_above_the_limit_is_bold() -> None:
    found = Difference(1e-12, 3e-8, "head.weight")
    assert cell_of(found, 1e-7) == "3e-08"
    assert cell_of(found, 1e-9) == "**3e-08 (head.weight)**"


def test_the_page_holds_every_model_and_all_are_equal() -> None:
    rows = rows_of(PAGE.read_text())
    assert list(rows) == list(cases())
    assert not [cell for row in rows.values() for cell in row if cell.startswith("**")]
