"""The fields of a strategy: what they take, and that files keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.compiler.context import Options, options_of
from weft.errors import StrategyError, UserError

FULL = weft.Strategy(
    batch={"x": weft.split(0), "y": (weft.split(0), weft.broadcast)},
    parameters={"*.weight": weft.split(1)},
    stages=[
        weft.Stage(["embed", "blocks.[0-3]"], placement=weft.placement("cpu", [[0, 1], [2, 3]])),
        weft.Stage(["blocks.*", "head"], placement=weft.placement("cpu", [4])),
    ],
    micro_batches=8,
    schedule="1f1b",
    zero=weft.Zero(level=3, axis=1),
    recompute=["blocks.*"],
    offload=["blocks.0"],
    precision="bf16",
    clip_norm=1,
    memory_limit=4 * 2**30,
    expert_capacity=1.5,
)


@pytest.mark.parametrize("strategy", [FULL, weft.Strategy(stages=2), weft.data_parallel()])
def test_a_file_keeps_every_field(strategy: weft.Strategy, tmp_path: Path) -> None:
    strategy.save(tmp_path / "strategy.yaml")
    assert weft.Strategy.load(tmp_path / "strategy.yaml") == strategy


ZEROS: weft.Strategy = weft.Strategy(
    zero={"*.experts.*": None, "*embed*": weft.Zero(1), "*": weft.Zero(3)}
)


@pytest.mark.parametrize(
    ("strategy", "version"),
    [
        (ZEROS, 3),
        (weft.Strategy(zero={"level": weft.Zero(2, 1), "axis": None}), 3),
        (weft.Strategy(stages=2, in_flight=[2, 1], grid=(4,)), 3),
        (weft.Strategy(zero=weft.Zero(3), grid=(4,)), 2),
        (weft.Strategy(zero=weft.Zero(3)), 1),
    ],
)
def test_a_file_has_the_first_version_that_says_it(
    strategy: weft.Strategy, version: int, tmp_path: Path
) -> None:
    strategy.save(tmp_path / "s.yaml")
    assert (tmp_path / "s.yaml").read_text().startswith(f"weft_strategy: {version}\n")
    read = weft.Strategy.load(tmp_path / "s.yaml")
    assert read == strategy
    assert read.to_text() == strategy.to_text()  # the order of patterns counts


def test_patterns_of_zero_in_another_order_are_other_options() -> None:
    """Plans that are kept for one are not taken for the other."""
    turned = weft.Strategy(zero=dict(reversed(tuple(ZEROS.zero.items()))))  # type: ignore[union-attr]
    assert options_of(turned) != options_of(ZEROS)
    assert options_of(ZEROS).zero == (
        ("*.experts.*", None),
        ("*embed*", weft.Zero(1)),
        ("*", weft.Zero(3)),
    )
    assert weft.Strategy(zero={}) == weft.Strategy()


def test_a_file_says_what_zero_takes(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    for text in ("{'*': {level: 4}}", "{'*': [1]}", "{level: 3, rank: 1}", "{'*': 'x'}"):
        path.write_text(f"weft_strategy: 3\nzero: {text}\n")
        with pytest.raises(StrategyError, match="cannot read the strategy .*: zero: "):
            weft.Strategy.load(path)


def test_a_file_holds_only_what_is_set(tmp_path: Path) -> None:
    weft.data_parallel().save(tmp_path / "strategy.yaml")
    text = (tmp_path / "strategy.yaml").read_text()
    assert text == "weft_strategy: 1\nbatch:\n  '*': S(0)\nparameters:\n  '*': B\n"


def test_the_compiler_is_told_everything() -> None:
    options = options_of(FULL)
    assert (options.stages, options.micro_batches, options.schedule) == (FULL.stages, 8, "1f1b")
    assert (options.zero, options.recompute, options.offload) == (
        weft.Zero(3, 1),
        ("blocks.*",),
        ("blocks.0",),
    )
    assert (options.precision, options.clip_norm, options.memory_limit) == (
        weft.Precision("bf16"),
        1.0,
        2**32,
    )
    assert options.expert_capacity == 1.5
    assert options_of(weft.Strategy()) == Options()


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"stages": 0}, "stages= must be a number of stages, or a list of weft.Stage"),
        ({"stages": ["blocks.*"]}, "got \\['blocks.\\*'\\]"),
        ({"micro_batches": 0}, "micro_batches= must be a whole number from 1, got 0"),
        ({"micro_batches": True}, "got True"),
        ({"schedule": "2f2b"}, "must be one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble'"),
        ({"zero": 3}, r"zero= must be weft.Zero\(level, axis\), None, or a mapping .*, got 3"),
        ({"zero": {"*": 3}}, r"mapping from patterns .*, got {'\*': 3}"),
        ({"zero": {1: None}}, "mapping from patterns .*, got {1: None}"),
        (
            {"zero": {"a": weft.Zero(1), "b": weft.Zero(3, axis=1)}},
            "zero= shards all parameters along one axis, got axes 0, 1 in .*; give each",
        ),
        ({"in_flight": 2}, r"in_flight= must be for each stage how many .*\(4, 3, 2, 1\).*got 2"),
        ({"in_flight": (2, 0)}, r"in_flight= must be .* from 1, .*got \(2, 0\)"),
        ({"in_flight": ()}, r"in_flight= must be .*got \(\)"),
        ({"recompute": "blocks.*"}, "recompute= must be a list of name patterns"),
        ({"offload": [1]}, "offload= must be a list of name patterns"),
        (
            {"precision": "fp8"},
            r"precision= must be one of 'bf16', 'fp16', a weft.Precision\(…\), or None, got 'fp8'",
        ),
        ({"precision": "fp32"}, "got 'fp32'"),
        ({"precision": 16}, "got 16"),
        ({"clip_norm": 0}, "clip_norm= must be a number above 0"),
        ({"clip_norm": float("nan")}, "got nan"),
        ({"expert_capacity": 0}, "expert_capacity= must be a number above 0"),
        ({"memory_limit": 1.5}, "memory_limit= must be a whole number from 1, got 1.5"),
    ],
)
def test_a_field_says_what_it_takes(fields: dict[str, Any], found: str) -> None:
    with pytest.raises(StrategyError, match=found):
        weft.Strategy(**fields)


def test_stages_and_zero_say_what_they_take() -> None:
    with pytest.raises(StrategyError, match="must be a list of name patterns"):
        weft.Stage("embed.*", placement=weft.placement("cpu", [0]))
    with pytest.raises(StrategyError, match=r"must be a weft.placement, got \[0, 1\]"):
        weft.Stage(["embed"], placement=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="must be 1, 2 or 3, got 4"):
        weft.Zero(level=4)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="number of an axis of the placement, got -1"):
        weft.Zero(level=1, axis=-1)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text("weft_strategy: 1\nstages: [{patterns: [a]}]\n")
    with pytest.raises(
        StrategyError,
        match="cannot read the strategy .*: stages: .*entries patterns, device and ranks",
    ):
        weft.Strategy.load(path)


EVERY = weft.Precision(
    compute="bf16",
    parameters="bf16",
    reduce="fp32",
    accumulate=None,
    masters=True,
    activations="fp32",
)


@pytest.mark.parametrize("precision", ["fp16", weft.Precision(), weft.Precision("bf16"), EVERY])
def test_a_file_keeps_precision(precision: Any, tmp_path: Path) -> None:
    strategy = weft.Strategy(precision=precision)
    strategy.save(tmp_path / "strategy.yaml")
    assert weft.Strategy.load(tmp_path / "strategy.yaml") == strategy
    assert options_of(strategy).precision is not None


def test_a_file_says_what_a_precision_takes(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    for text, found in (("{reduce: fp8}", "reduce=…"), ("{output: bf16}", "output")):
        path.write_text(f"weft_strategy: 1\nprecision: {text}\n")
        with pytest.raises(StrategyError, match=found):
            weft.Strategy.load(path)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", torch.bfloat16])
def test_dtypes_have_the_names_of_pytorch_too(name: Any) -> None:
    assert weft.Strategy(precision=name) == weft.Strategy(precision="bf16")
    assert weft.Precision(name, reduce=torch.float32) == weft.Precision("bf16", reduce="fp32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"compute": "fp32"}, r"Precision\(compute=…\) must be 'bf16', 'fp16' or None, got 'fp32'"),
        ({"parameters": "fp8"}, r"Precision\(parameters=…\) must be"),
        ({"reduce": torch.float64}, "got torch.float64"),
        ({"accumulate": "bf16"}, r"Precision\(accumulate=…\) must be 'fp32' or None, got 'bf16'"),
        ({"activations": "bf16"}, r"Precision\(activations=…\) must be 'fp32' or None"),
        ({"masters": "fp32"}, r"Precision\(masters=…\) must be True or False, got 'fp32'"),
    ],
)
def test_a_precision_says_what_it_takes(fields: dict[str, Any], found: str) -> None:
    with pytest.raises(StrategyError, match=found):
        weft.Precision(**fields)


def test_signatures_of_single_ops_are_saved_and_read_back(tmp_path: Path) -> None:
    fixed: Any = {"mm": "S(0), B -> S(0)", "add": ("B, B -> B", "S(0), S(0) -> S(0)")}
    strategy = weft.Strategy(signatures=fixed)
    strategy.save(tmp_path / "s.yaml")
    assert weft.Strategy.load(tmp_path / "s.yaml") == strategy
    assert strategy.signatures == fixed


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write the strategy .*: Is a directory; give"):
        weft.data_parallel().save(tmp_path)
