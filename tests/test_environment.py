"""Variables of the environment: what users may set is on one page, and what they set wrongly is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.errors import UserError
from weft.hardware.planning_costs import takes_measured
from weft.runtime.memory.heap import is_free_to_choose
from weft.runtime.world.distributed import shares_memory

ROOT = Path(__file__).parents[1]
# What processes that weft starts tell each other.
INTERNAL = {
    *("WEFT_FAILURE_NOTES", "WEFT_LAUNCHER", "WEFT_LINE", "WEFT_MEETING", "WEFT_RANK_PROCESS"),
    *("WEFT_RESTART", "WEFT_STORE"),
}


def test_every_variable_that_is_read_has_a_row():
    sources = (path.read_text() for path in (ROOT / "src/weft").rglob("*.py"))
    read = {name for text in sources for name in re.findall(r'"(WEFT_[A-Z_]+)"', text)}
    rows = re.findall(r"^\| `(WEFT_[A-Z_]+)`", (ROOT / "docs/environment.md").read_text(), re.M)
    assert rows == sorted(read - INTERNAL)


@pytest.mark.parametrize(
    ("read", "name", "values"),
    [
        (is_free_to_choose, "WEFT_MALLOC", ("kept", "system")),
        (shares_memory, "WEFT_TRANSPORT", ("shared", "gloo")),
        (takes_measured, "WEFT_PLAN_COSTS", ("measured", "usual")),
    ],
)
def test_wrong_values_are_told(read, name, values):
    assert read({})
    assert read({name: ""})
    assert [read({name: value}) for value in values] == [True, False]
    with pytest.raises(UserError, match=f"{name} must be {' or '.join(values)}, got 'tcp'"):
        read({name: "tcp"})
