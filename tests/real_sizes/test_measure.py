"""What is counted in plans of tiny models is what can be counted by hand; a doubled exchange is seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

import torch
from torch import nn

import weft
from tools.real_sizes import run
from tools.real_sizes.family import Batch, Family, Shape
from tools.real_sizes.judge import checks
from tools.real_sizes.measure import Planned, planned
from tools.real_sizes.plans import KINDS
from tools.real_sizes.run import Sized
from weft.compiler.pipeline import Compiled
from weft.ir.plan import Collective

WIDTH, LAYERS = 64, 4


def _build(layers: int, tokens: int) -> nn.Module:
    with torch.device("meta"):
        parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers))
        return nn.Sequential(*parts)


def _batch(sequences: int, tokens: int) -> Batch:
    x = torch.empty(sequences, tokens, WIDTH, device="meta")
    return {"x": x, "y": x.clone()}


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


STACK = Family(
    "stack",
    "",
    _build,
    _batch,
    LAYERS,
    WIDTH,
    lambda layers, tokens: 0,
    {},
    blocks=("*",),
    loss=_loss,
)
ALL = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
PRODUCT = 2 * 32 * 16 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def sized() -> Sized:
    return Sized.of(STACK, Shape(LAYERS, 16, 32))


def plan(sized: Sized, kind: str, grid: tuple[int, ...]) -> Planned:
    told = KINDS[kind]
    return sized.planned(told.strategy(STACK), told.grid_of(grid))


def test_data_parallel(sized: Sized) -> None:
    found = plan(sized, "data", (8,))
    # The loss' sum and its count of elements are a few bytes.
    assert found.sent["all_reduce"] == pytest.approx(2 * 7 / 8 * ALL, abs=64)
    assert found.sent.keys() == {"all_reduce"}
    # Forward, and two products in the backward, but the gradient of the batch.
    assert found.work == (3 * LAYERS - 1) * PRODUCT / 8
    assert found.parameters == ALL
    assert found.states == pytest.approx(2 * ALL, abs=64)
    assert found.causes[0][1] == 2 * 7 / 8 * WIDTH * WIDTH * 4


def test_zero_3(sized: Sized) -> None:
    found = plan(sized, "ZeRO 3", (8,))
    assert found.sent["reduce_scatter"] == 7 / 8 * ALL
    assert found.parameters == ALL / 8
    weights, biases = LAYERS * WIDTH * WIDTH * 4, LAYERS * WIDTH * 4
    # The backward reads no bias and no weight of the first layer; that of the last is still there.
    assert found.sent["all_gather"] == 7 / 8 * (2 * weights + biases - 2 * WIDTH * WIDTH * 4)


def test_a_pipeline_sends_each_cut_once_for_each_micro_batch(sized: Sized) -> None:
    found = plan(sized, "pipeline", (4, 2))
    activation = 32 * 16 * WIDTH * 4
    assert found.sent["transfer"] == pytest.approx(2 * 3 * activation / 2, rel=0.001)
    assert found.sent["all_reduce"] == pytest.approx(2 * 1 / 2 * ALL, abs=1024)
    assert found.work == (3 * LAYERS - 1) * PRODUCT / 2
    assert found.parameters == ALL


def doubled(compiled: Compiled) -> Planned:
    """The plan as if every reduction were there twice."""
    programs = tuple(
        replace(each, nodes=(*each.nodes, *(n for n in each.nodes if isinstance(n, Collective))))
        for each in compiled.programs
    )
    return planned(replace(compiled, programs=programs))


def test_a_doubled_exchange_fails_the_gate(sized: Sized, monkeypatch: pytest.MonkeyPatch) -> None:
    book = KINDS["data"].textbook(sized.facts, (8,))
    alone = sized.planned(weft.data_parallel(), (1,))
    check = partial(checks, "stack", "data", book=book, beside=alone)
    good = {each.quantity: each.verdict for each in check(plan(sized, "data", (8,)))}
    assert good["bytes"] == "ok"
    monkeypatch.setattr(run, "planned", doubled)
    bad = {each.quantity: each for each in check(plan(sized, "data", (8,)))}
    assert bad["bytes"].verdict == "FAIL"
    assert bad["bytes"].ratio == pytest.approx(2.0, rel=0.01)
