"""The script that all recipes start shows the losses of plain PyTorch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from on_ranks import passed, run_ranks
from recipes.harness import RECIPES, compared


@pytest.mark.slow
def test_it_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    plain = importlib.import_module("plain")
    script, out = RECIPES / "train.py", tmp_path / "gpt"
    arguments = ("--out", str(out), "--steps", "9", "--die-at", "8")
    ended = run_ranks(script, 2, *arguments, WEFT_TIMEOUT="20")
    assert ended[0][1] == -9, ended[0][0]
    passed(script, 2, *arguments)
    lines = map(json.loads, (out / "losses.jsonl").read_text().splitlines())
    compared([(line["step"], line["loss"]) for line in lines], plain.losses(9), killed=True)
    for name in ("plain", "small_gpt"):
        sys.modules.pop(name, None)
