"""The plan's peak memory is the one that is measured, kind by kind where both can tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, MLP, ResNet, classification_loss, image_batch, token_loss, vector_batch
from weft.capture import capture
from weft.compiler.context import Options
from weft.compiler.hints import Hints
from weft.compiler.pipeline import compile_graph
from weft.errors import StrategyError
from weft.units import bytes_text

COLUMNS, ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")
GRID = [[0, 1], [2, 3]]
DATA = {"*": weft.split(0)}


def mlp() -> tuple[nn.Module, Any, Any]:
    x, y = torch.randn(128, 64), torch.randint(10, (128,))
    return MLP(64, 128, 10), classification_loss, {"x": x, "y": y}


def gpt() -> tuple[nn.Module, Any, Any]:
    x, y = torch.randint(64, (8, 16)), torch.randint(64, (8, 16))
    return GPT(64, 32, 2, 2, 16), token_loss, {"x": x, "y": y}


def resnet() -> tuple[nn.Module, Any, Any]:
    return ResNet().double(), classification_loss, image_batch(8)


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any, Any]], Any, weft.Strategy]] = {
    "mlp": (mlp, [0], weft.data_parallel()),
    "mlp, data": (mlp, [0, 1], weft.data_parallel()),
    "mlp, tensor": (mlp, [0, 1], weft.tensor_parallel(["hidden"], ["head"])),
    "gpt": (gpt, [0], weft.data_parallel()),
    "gpt, data": (gpt, [0, 1], weft.data_parallel()),
    "gpt, tensor": (gpt, [0, 1], weft.tensor_parallel(COLUMNS, ROWS)),
    "gpt, hybrid": (gpt, GRID, weft.hybrid_parallel(COLUMNS, ROWS)),
    "gpt, zero 1": (gpt, [0, 1], weft.Strategy(DATA, zero=weft.Zero(1))),
    "gpt, zero 3": (gpt, [0, 1], weft.Strategy(DATA, zero=weft.Zero(3))),
    "gpt, recomputed": (gpt, [0, 1], weft.Strategy(DATA, recompute=["blocks.*"])),
    "gpt, micro-batches": (gpt, [0, 1], weft.Strategy(DATA, micro_batches=4)),
    "gpt, zero 3, micro-batches": (
        gpt,
        [0, 1],
        weft.Strategy(DATA, micro_batches=4, zero=weft.Zero(3)),
    ),
    "gpt, pipeline": (gpt, [0, 1], weft.Strategy(stages=2, micro_batches=4, schedule="1f1b")),
    "resnet, micro-batches": (resnet, [0], weft.Strategy(micro_batches=4)),
    "resnet": (resnet, [0], weft.data_parallel()),
    "resnet, data": (resnet, [0, 1, 2, 3], weft.data_parallel()),
}


@pytest.mark.parametrize("case", CASES)
def test_predicted_is_measured(case: str) -> None:
    make, ranks, strategy = CASES[case]
    model, loss, batch = make()
    placement = weft.placement("cpu", ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with weft.local_world(len(placement.ranks)) as world:
        program = weft.compile(
            model, loss, optimizer, batch, placement=placement, strategy=strategy
        )
        before = program.memory()
        program.step(batch)
        after = program.memory()
    assert [each.rank for each in after] == list(world.ranks)
    for old, new in zip(before, after, strict=True):
        assert old.measured is None
        assert old.predicted == new.predicted
        assert new.measured is not None
        for kind in ("parameters", "buffers", "states", "batch", "constants"):
            assert getattr(new.measured, kind) == getattr(new.predicted, kind), kind
        # The plan counts what may be there at once, whichever of two queues is ahead.
        assert new.measured.peak <= 1.005 * new.predicted.peak
        assert new.predicted.peak <= 1.2 * new.measured.peak


def test_a_check_is_not_measured() -> None:
    """It runs beside what is put back behind it; what was measured before it stays."""
    model, loss, batch = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2) as world:
        program = weft.compile(model, loss, optimizer, batch, placement=placement, verify=True)
        assert program.memory()[world.ranks[0]].measured is None
        program.step(batch)
        found = program.memory()
        program.verify(batch)
        again = program.memory()
    for each, same in zip(found, again, strict=True):
        assert each.measured is not None
        assert each.measured.states == each.predicted.states
        assert each.measured.peak <= each.predicted.peak
        assert same.measured == each.measured


def test_memory_prints_a_table() -> None:
    model, loss, batch = mlp()
    with weft.local_world(1):
        placement = weft.placement("cpu", [0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program = weft.compile(model, loss, optimizer, batch, placement=placement)
        program.step(batch)
        memory = program.memory()
    title, header, predicted, measured = str(memory).splitlines()
    assert "memory at its peak" in title
    assert header.split()[-2:] == ["communication", "peak"]
    assert predicted.split()[:4] == ["0", "predicted", "37.5", "KiB"]
    assert measured.split()[:4] == ["0", "measured", "37.5", "KiB"]
    assert memory[0].measured is not None


def test_a_segment_frees_what_it_reads() -> None:
    """Saved activations go while the backward runs: gradients do not add to the most of them."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    batch = {"x": torch.randn(64, 256)}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    with weft.local_world(2) as world:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program = weft.compile(
            model, loss, optimizer, batch, placement=weft.placement("cpu", [0, 1])
        )
        program.step(batch)
        found = program.memory()[world.ranks[0]].measured
    assert found is not None
    gradients = sum(each.numel() * 4 for each in model.parameters())
    saved = 7 * 32 * 256 * 4
    # All local gradients, and flat once more; never with all activations.
    assert found.peak - found.parameters - found.batch < 2 * gradients + saved / 2


@pytest.mark.parametrize(("kernels", "most"), [("aten", 1.6), ("torch", 3.6)])
def test_a_loss_takes_one_tensor_of_the_size_of_the_logits(kernels: Any, most: float) -> None:
    """Log-probabilities and gradient stand where the logits stood; torch's own kernels take three at a time."""
    model = nn.Linear(8, 2048)
    batch = {"x": torch.randn(256, 8), "y": torch.randint(2048, (256,))}
    with weft.local_world(1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        placement = weft.placement("cpu", [0])
        program = weft.compile(
            model, classification_loss, optimizer, batch, placement=placement, kernels=kernels
        )
        program.step(batch)
        (found,) = program.memory()
    assert found.measured is not None
    logits = 256 * 2048 * 4
    assert most - 0.6 < found.measured.activations / logits < most
    assert found.measured.peak == found.predicted.peak


def test_measuring_ends_with_the_first_step() -> None:
    model = MLP().double()
    with weft.local_world(1):
        placement = weft.placement("cpu", [0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program = weft.compile(
            model, classification_loss, optimizer, vector_batch(8), placement=placement
        )
        works = program._core.executors[0]._works
        watched = {id: work.act for id, work in works.items()}
        program.step(vector_batch(8))
        first = program.memory()[0].measured
        assert any(works[id].act is not act for id, act in watched.items())
        program.step(vector_batch(8))
        assert program.memory()[0].measured is first


@pytest.mark.one_process("it reads the plan of rank 0")
def test_a_plan_over_the_limit_is_an_error_that_says_what_would_help() -> None:
    model, loss, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = weft.placement("cpu", [0, 1])

    def compiled(limit: int | None) -> weft.Program:
        strategy = replace(weft.data_parallel(), memory_limit=limit)
        return weft.compile(model, loss, optimizer, batch, placement=placement, strategy=strategy)

    with weft.local_world(2):
        peak = compiled(None).memory()[0].predicted
        assert compiled(peak.peak).memory()[0].predicted == peak
        with pytest.raises(StrategyError) as caught:
            compiled(peak.peak - 1)
    text = str(caught.value)
    assert text.startswith("rank 0 would hold ")
    assert "1 B more than memory_limit=" in text
    assert f"activations {bytes_text(peak.activations)}" in text
    assert re.search(r"addmm_\d+ by aten.addmm.default at \S*models.py:\d+ in blocks.\d", text)
    assert 'recompute=["blocks.*"]: up to ' in text
    assert "micro_batches=2: about " in text
    saved = bytes_text(peak.states // 2)
    assert f"zero=weft.Zero(level=1, axis=0): {saved} less states" in text
    assert f"a memory_limit of at least {peak.peak}" in text


def test_every_rank_looks_at_all_of_a_pipeline() -> None:
    model, loss, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    graph = capture(model, loss, optimizer, batch, "cpu", training=True).graph
    placement = weft.placement("cpu", [0, 1])
    options = Options(stages=2, micro_batches=4, schedule="1f1b")
    compiled = compile_graph(graph, Hints({}), placement, [0, 1], options)
    peaks = {each.rank: each.memory.peak for each in compiled.peaks}
    largest = max(peaks, key=lambda rank: peaks[rank])
    limited = replace(options, memory_limit=min(peaks.values()))
    for rank in placement.ranks:
        with pytest.raises(StrategyError, match=f"^rank {largest} would hold "):
            compile_graph(graph, Hints({}), placement, [rank], limited)
