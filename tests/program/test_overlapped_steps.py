"""Steps whose batch is cut so that exchanges overlap with products equal those of a single device."""

from __future__ import annotations

import pytest
import torch

import weft
from models import GPT, token_batch, token_loss
from single_device import assert_same_training, compiled, plain_training
from weft.compiler import pipeline
from weft.compiler.local.overlap import BatchCut
from weft.ir.plan import Collective, Communicate

COLUMNS, ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")

pytestmark = pytest.mark.usefixtures("double_precision")


def parts_exchanged(program: weft.Program) -> int:
    """How many collectives of the first rank exchange a part of the batch, which the cut names so."""
    actors = program.plan.ranks[0].actors
    nodes = [
        node for actor in actors if isinstance(actor, Communicate) for node in actor.collectives
    ]
    return sum(isinstance(node, Collective) and ".part" in node.output.name for node in nodes)


@pytest.mark.parametrize(
    ("strategy", "grid", "parts"),
    [
        (weft.tensor_parallel(COLUMNS, ROWS, sequence=1), [0, 1], 4),
        (weft.hybrid_parallel(COLUMNS, ROWS, sequence=1), [[0, 1], [2, 3]], 2),
    ],
    ids=["sequence parallel", "beside data parallel"],
)
def test_equal_to_a_single_device(
    strategy: weft.Strategy, grid: list[int], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "best_cut", lambda *_: BatchCut(parts))
    torch.manual_seed(0)
    model, batches = GPT(), [token_batch(8, seed=seed) for seed in range(2)]
    expected = plain_training(model, token_loss, batches)
    with compiled(model, token_loss, batches[0], grid, strategy) as program:
        assert parts_exchanged(program) >= parts * 7
        assert f"the batch in {parts} parts" in program.explain()
        assert_same_training(program, batches, expected)
