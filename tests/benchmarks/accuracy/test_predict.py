"""Steps of rows by `weft.simulate`, on a small decoder."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from benchmarks.accuracy.__main__ import groups, memory_scores
from benchmarks.accuracy.decoder import Form
from benchmarks.accuracy.predict import Predicted, grid_of, predict, strategy_of
from benchmarks.accuracy.row import Row

FORM = Form(64, 4, 4, 256, 512, 32)
ROW = Row(
    file="f", group="g", id="1", form=FORM, layers=2, data=2, tensor=2,
    pipeline=1, chunks=1, zero=0, sequences=2, micro_batches=2, recompute="none",
    sequence_parallel=False, dtype="bfloat16", topology="a100-80gb", schedule="1f1b", seconds=1.0,
    memory=None,
)  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        replace(ROW, dtype="float32", tensor=1, zero=3, recompute="full"),
        replace(ROW, pipeline=2, chunks=2, schedule="interleaved", layers=4),
        replace(ROW, form=replace(FORM, llama=True, fused=True, tied=False), zero=1),
    ],
    ids=["tensor", "ZeRO 3", "interleaved", "llama"],
)
def test_rows_of_all_kinds_can_be_planned(row: Row) -> None:
    found = predict(row)
    assert found.fits
    assert 0 < found.seconds < 1


def test_layers_are_extended_along_a_line() -> None:
    six, ten = (predict(replace(ROW, layers=count)) for count in (6, 10))
    two, four = (predict(replace(ROW, layers=count)) for count in (2, 4))
    assert six.seconds == pytest.approx(2 * four.seconds - two.seconds)
    assert ten.seconds > six.seconds > four.seconds
    assert ten.memory > six.memory


def test_micro_batches_are_extended_along_a_line() -> None:
    eight, four, two = (predict(replace(ROW, micro_batches=count)) for count in (8, 4, 2))
    assert eight.seconds == pytest.approx(2 * (four.seconds - two.seconds) + four.seconds)
    assert eight.seconds > four.seconds
    assert eight.memory == four.memory  # held ones do not grow with them


def test_the_grid_is_pipeline_by_data_by_tensor() -> None:
    assert grid_of(replace(ROW, pipeline=2)) == (2, 2, 2)
    assert grid_of(ROW) == (2, 2)
    assert grid_of(replace(ROW, data=1, tensor=1)) == (1,)
    strategy = strategy_of(replace(ROW, pipeline=2, zero=1))
    assert strategy.stages == 2
    assert strategy.zero == weft.Zero(1, axis=1)
    assert strategy.batch["*"] == (weft.broadcast, weft.split(0), weft.broadcast)
    assert strategy.parameters["token.weight"] == (weft.broadcast, weft.broadcast, weft.split(0))


def test_what_is_not_told_of_recomputation_is_the_least_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = [0.0]

    def simulated(row: Row, blocks: int) -> Predicted:
        memory = {"none": 3.0, "selective": 2.0, "full": 1.0}[row.recompute]
        return Predicted(1.0, memory, 0.0, room[0])

    monkeypatch.setattr("benchmarks.accuracy.predict._simulated", simulated)
    for capacity, memory in ((3.0, 3.0), (2.0, 2.0), (1.0, 1.0), (0.5, 1.0)):
        room[0] = capacity
        assert predict(replace(ROW, recompute="")).memory == memory
    assert predict(replace(ROW, recompute="selective")).memory == 2.0


def test_scores_of_groups_and_of_memory() -> None:
    rows = [
        (replace(ROW, memory=8.0, allocated=True), Predicted(1.1, 10.0, 2.0, 20.0)),
        (replace(ROW, seconds=None, out_of_memory=True), Predicted(1.0, 30.0, 2.0, 20.0)),
    ]
    (group,) = groups(rows)
    assert group["mean_error"] == pytest.approx(0.1)
    (memory,) = memory_scores(rows)
    assert (memory["rows"], memory["mean_error"], memory["f1"]) == (1, 0.0, 1.0)
