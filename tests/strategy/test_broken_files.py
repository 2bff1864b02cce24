"""Files of strategies with mistakes: a `StrategyError` that names the file and the entry, soon, or a strategy."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

import weft
from mutations import mutated
from weft.errors import StrategyError
from weft.strategy import Strategy
from weft.strategy.parts import Zero

FULL = Strategy(
    batch={"*": weft.split(0)},
    parameters={"0.*": (weft.split(0), weft.broadcast), "*": weft.broadcast},
    activations={"1": weft.partial("sum")},
    stages=[
        weft.Stage(["0"], placement=weft.placement("cpu", [0, 1])),
        weft.Stage(["1"], placement=weft.placement("cpu", [0, 1])),
    ],
    micro_batches=4,
    schedule="1f1b",
    in_flight=(2, 1),
    zero={"0.*": Zero(2), "*": None},
    recompute=("0",),
    precision="bf16",
    clip_norm=1.0,
    memory_limit=10**9,
    signatures={"x": "S(0), B -> S(0)"},
).to_text()


def test_texts_with_mistakes_are_read_or_told() -> None:
    assert Strategy.from_text(FULL, "a.yaml").micro_batches == 4
    for broken in mutated(FULL, 600):
        with suppress(StrategyError):  # all else fails the test
            Strategy.from_text(broken, "a.yaml")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("stages: &a [*a]", "contains itself"),
        ("parameters: " + "[" * 5000, "levels deep"),
        ("stages: [" + "1, " * 40_000 + "1]", "stages"),
        ("micro_batches: " + "9" * 5000, "number"),
        ("micro_batches: 2001-13-45", "date"),
        ("micro_batches: 1\nmicro_batches: 2", "stands twice"),
        ("parameters: {? [1] : B}", "key"),
        ("7: 8", "unknown entries: 7"),
        ("batch: {3: B}", "batch"),
        ("batch: 3", "batch"),
        ("parameters: 0", "parameters"),
        ("activations: []", "activations"),
        ("batch: ''", "batch"),
        ("zero: [1]", "zero"),
        ("signatures: {a: [[1]]}", "signatures"),
        ("precision: {half: x}", "precision"),
        ("precision: {compute: [1]}", "compute"),
        (
            "stages: [{patterns: x}]",
            "expected the entries patterns, device and ranks of each stage",
        ),
        ("stages: [[1]]", "expected the entries patterns, device and ranks of each stage"),
        ("stages: [{patterns: [x], device: [1], ranks: [0]}]", "stages"),
        ("stages: [{patterns: [x], device: cpu, ranks: [[0], 1]}]", "stages"),
        ("schedule: [1]", "schedule"),
        ("grid: [1.5]", "grid"),
    ],
)
def test_entries_that_are_none_are_named(entry: str, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(StrategyError, match=r"a\.yaml") as caught:
        Strategy.from_text(f"weft_strategy: 3\n{entry}\n", "a.yaml")
    assert time.monotonic() - started < 20
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("first", ["true", "'3'", "[3]", "4", ""])
def test_the_format_is_a_number(first: str) -> None:
    with pytest.raises(StrategyError, match="must begin with weft_strategy: 3"):
        Strategy.from_text(f"weft_strategy: {first}\n", "a.yaml")


def test_what_is_no_path_is_told(tmp_path: Path) -> None:
    for path in (None, 3, [tmp_path]):
        with pytest.raises(StrategyError, match="must be the path of a file"):
            Strategy.load(path)  # type: ignore[arg-type]
    (tmp_path / "latin").write_bytes("weft_strategy: 3 # é".encode("latin-1"))
    for name in ("none", ".", "latin"):
        with pytest.raises(StrategyError, match="cannot read the strategy"):
            Strategy.load(tmp_path / name)
