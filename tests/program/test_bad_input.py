"""Whatever is wrong is refused before anything runs, naming the place, what was found and what would do."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import MLP, classification_loss, vector_batch
from weft.errors import BatchError, CaptureError, LayoutError, RuleError, StrategyError, UserError

PAIR = weft.placement("cpu", [0, 1])
S, B = weft.split, weft.broadcast


def compiled(model: nn.Module | None = None, **changes: Any) -> weft.Program:
    model = model or MLP()
    arguments: dict[str, Any] = {
        "loss_fn": classification_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "example_batch": vector_batch(8, dtype=torch.float32),
        "placement": PAIR,
    }
    return weft.compile(model, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        (
            weft.Strategy(parameters={"haed.weight": S(0)}),
            StrategyError,
            "names that exist: head.weight",
        ),
        (weft.Strategy(batch={"image": S(0)}), StrategyError, "'image': .* matches nothing"),
        (weft.Strategy(parameters={"head.bias": S(1)}), LayoutError, "head.bias .* no dimension 1"),
        (weft.Strategy(parameters={"head.weight": (S(0), B)}), StrategyError, "1 axes .* got 2"),
        (weft.Strategy(batch={"x": weft.partial()}), LayoutError, "split or broadcast, got P"),
        ("data_parallel", StrategyError, "must be a weft.Strategy"),
    ],
)
def test_strategies_that_do_not_fit(strategy: Any, error: type[Exception], message: str) -> None:
    with weft.local_world(2), pytest.raises(error, match=message):
        compiled(strategy=strategy)


def test_a_placement_larger_than_the_world() -> None:
    with weft.local_world(2), pytest.raises(LayoutError, match=r"names ranks \[2, 3\].* has 2"):
        compiled(placement=weft.placement("cpu", [0, 1, 2, 3]))


def test_what_is_no_placement() -> None:
    with pytest.raises(UserError, match=r"placement= must be weft.placement.*got 'cpu'"):
        compiled(placement="cpu")


def test_a_placement_on_devices_that_are_not_there() -> None:
    with weft.local_world(2), pytest.raises(UserError, match="cuda"):
        compiled(placement=weft.placement("cuda", [0, 1]))


@pytest.mark.parametrize(
    ("grid", "message"),
    [([[0, 1], [2]], "full grid"), ([0, 0], "twice"), ([], "full grid"), ([0, -1], "from 0")],
)
def test_placements_that_are_no_grid(grid: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        weft.placement("cpu", grid)


def test_a_batch_of_another_dtype_or_with_more_leaves() -> None:
    with weft.local_world(2):
        program = compiled()
        with pytest.raises(BatchError, match=r"x.*float32\[8, 8\].*float64\[6, 8\]"):
            program.step(vector_batch(6, dtype=torch.float64))
        with pytest.raises(BatchError, match="z"):
            program.step({**vector_batch(8, dtype=torch.float32), "z": torch.zeros(1)})


def test_an_op_without_a_rule_is_named_with_its_line() -> None:
    @torch.library.custom_op("weft_tests::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    mystery.register_fake(torch.empty_like)
    mystery.register_autograd(lambda context, gradient: gradient)

    class Mysterious(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mystery(super().forward(x))

    with weft.local_world(2), pytest.raises(RuleError, match=r"mystery") as error:
        compiled(Mysterious())
    assert "test_bad_input.py:" in str(error.value)


def test_control_flow_that_depends_on_data() -> None:
    def branching(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = classification_loss(model, batch)
        return loss * 2 if loss > 1 else loss

    with weft.local_world(2), pytest.raises(CaptureError, match=r"test_bad_input\.py:"):
        compiled(loss_fn=branching)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch: {}", "must begin with weft_strategy"),
        ("weft_strategy: 1\nbatch:\n  x: S(a)\n", 'an SBP must be "S'),
        ("weft_strategy: 1\nlayers: {}\n", "unknown entries: layers"),
        ("weft_strategy: 1\nbatch: [", "cannot read"),
    ],
)
def test_strategy_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(StrategyError, match=message):
        weft.Strategy.load(tmp_path / "bad.yaml")


@pytest.mark.one_process("the world of processes lasts as long as they do")
def test_a_step_outside_of_its_world() -> None:
    with weft.local_world(2):
        program = compiled()
    with pytest.raises(UserError, match="inside of `with weft.local_world"):
        program.step(vector_batch(8, dtype=torch.float32))


@pytest.mark.one_process("it counts the threads of all ranks")
def test_a_program_that_is_gone_leaves_no_threads() -> None:
    with weft.local_world(2):
        before = threading.active_count()
        program = compiled()
        assert threading.active_count() > before
        del program
        gc.collect()
        assert threading.active_count() == before
