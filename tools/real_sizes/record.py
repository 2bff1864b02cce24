"""The results as JSON, written and read: rows that are not planned again stay as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tools.real_sizes.family import Shape
from tools.real_sizes.judge import Check
from tools.real_sizes.measure import Planned
from tools.real_sizes.rows import Row, all_rows
from tools.real_sizes.run import Result
from tools.real_sizes.textbook import Figures


def json_of(results: Sequence[Result]) -> str:
    """Every figure, the bytes by kind, and what asked for them."""
    found = [{"name": each.row.name, "fails": each.fails, **asdict(each)} for each in results]
    return json.dumps(found, indent=1)


def results_of(text: str) -> list[Result]:
    """What `json_of` wrote."""
    return [_result(each) for each in json.loads(text)]


def _result(told: Mapping[str, Any]) -> Result:
    row = told["row"]
    shape = Shape(**row["shape"])
    planned, book = told["planned"], told["book"]
    if planned is not None:
        planned = Planned(
            **{**planned, "causes": tuple((why, size) for why, size in planned["causes"])}
        )
    return Result(
        Row(row["family"], shape, row["kind"], tuple(row["grid"])),
        told["seconds"],
        tuple(Check(**check) for check in told["checks"]),
        planned,
        None if book is None else Figures(**book),
        told["error"],
    )


def merged(old: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Old rows with new ones in their places, in the order of the table; rows that it has no more go."""
    found = {each.row.name: each for each in (*old, *new)}
    order = [row.name for row in all_rows()]
    known = [found[name] for name in order if name in found]
    return known + [each for each in new if each.row.name not in order]
