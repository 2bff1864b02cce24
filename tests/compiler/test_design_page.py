"""docs/design.md: its picture has the passes of the pipeline, in the order in which they run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.compiler import pipeline
from weft.compiler.passes import Decision

PICTURE = (Path(__file__).parents[2] / "docs/design.md").read_text().split("```")[1]
NO_TABLES = {
    "lay": ["lay_out"],
    "lower": ["communicators", "rank_classes", "localize_all", "plan_ranks"],
}
TABLES = {"transform": ["TRANSFORM"], "lay": ["LAY", "LAID"], "lower": ["ON_RANKS"]}


def names(part: str) -> list[str]:
    """The passes of the tables of a part, in order."""
    rows = (row for table in TABLES[part] for row in getattr(pipeline, table))
    return [row.__name__ for row in rows if not isinstance(row, Decision)]


@pytest.mark.parametrize("part", TABLES)
def test_the_picture_has_the_passes_as_they_run(part: str) -> None:
    (drawn,) = re.findall(rf"│ {part} (.*?)(?=\n   ▼|\n   │ \w)", PICTURE, re.DOTALL)
    words = re.findall(r"\w+", drawn)
    assert [word for word in words if word in names(part)] == names(part)
    assert [word for word in words if word in NO_TABLES.get(part, ())] == NO_TABLES.get(part, [])
