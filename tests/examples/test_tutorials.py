"""The script of docs/tutorial/two_ranks.md: two processes print what one prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from on_ranks import passed

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "two_ranks.md"


def losses(outputs: list[str]) -> list[float]:
    return [float(each) for each in re.findall(r"epoch \d: loss ([\d.]+)", "".join(outputs))]


@pytest.mark.timeout(200)
def test_the_script_on_two_processes_prints_what_it_prints_on_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```python\n(# train\.py: .*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(text)
    alone = losses(passed(script, 1, folder=tmp_path))
    assert len(alone) == 2
    assert alone[1] < alone[0]
    assert losses(passed(script, 2, folder=tmp_path)) == pytest.approx(alone, abs=2e-4)
