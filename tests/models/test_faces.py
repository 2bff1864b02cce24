"""A head split by classes: the logits are never whole on any rank, forward or backward."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

import weft
from examples.models import faces, images
from tools.model_cases import B, Case, Comparison, S, settings
from tools.paper_models import CASES

# Enough identities that a whole row of logits is dearer than three small reductions.
IDENTITIES, SIZE = 4099, 8
LARGE = Case(
    partial(faces.FaceRecognition, IDENTITIES, 12, (1,), 4),
    faces.loss,
    partial(images.batch, side=8, classes=IDENTITIES),
    faces.LAYOUTS,
    SIZE,
)


@cache
def compiled(strategy: str) -> weft.Program:
    grid, chosen = settings(LARGE.layouts)[strategy]
    with weft.local_world(torch.tensor(grid).numel()):
        program = Comparison(LARGE).compile(grid, chosen)
        program.close()
    return program


def logits(program: weft.Program) -> list[Any]:
    """All values that have the logits' shape."""
    every = program.graph.values.values()
    return [value for value in every if value.shape == (SIZE, IDENTITIES)]


@pytest.mark.parametrize("strategy", ["tensor, 2", "hybrid, 2×2"])
def test_logits_are_never_whole(strategy: str) -> None:
    found = logits(compiled(strategy))
    assert len(found) > 4  # the logits, what is made of them, and their gradients
    assert all(S(1) in value.layout.sbp for value in found)


def test_explain_says_so() -> None:
    text = compiled("tensor, 2").explain(details=True)
    boxing = text[text.index("\nboxing") : text.index("\nmemory")]
    assert "aten.mm.default" in text
    assert f"[{SIZE}, {IDENTITIES}]" in text
    assert f"[{SIZE}, {IDENTITIES}]" not in boxing
    assert f"[{SIZE}, 1]" in boxing


def test_three_steps_equal_plain_pytorch() -> None:
    found = Comparison(LARGE).difference(*settings(LARGE.layouts)["hybrid, 2×2"])
    assert max(found.loss, found.state) < 1e-9, found


def test_whole_classes_keep_the_fused_op() -> None:
    case = CASES["rnntc"]
    grid, _ = settings(case.layouts)["data, 2"]
    strategy = weft.Strategy(batch={"*": S(0)}, parameters={"*": B})
    with weft.local_world(2):
        program = Comparison(case).compile(grid, strategy)
        program.close()
    assert "aten._log_softmax.default" in str(program.graph)
