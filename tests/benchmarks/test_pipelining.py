"""Where pipelines of peers are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.search.works import WORKS
from benchmarks.systems.pipelining import balanced, even


def test_what_takes_long_stands_alone() -> None:
    assert balanced([3.0, 1.0, 1.0, 1.0], 2) == (1,)
    assert balanced([1.0, 1.0, 1.0, 1.0, 4.0, 4.0], 3) == (4, 5)


def test_blocks_that_are_left_over_go_to_the_middle() -> None:
    assert even(8, 4) == [2, 2, 2, 2]
    assert even(6, 4) == [1, 2, 2, 1]


@pytest.mark.parametrize("work", ["mlp_small", "rnnlm", "alexnet"])
def test_a_chain_makes_the_models_forward(work: str) -> None:
    model, x = WORKS[work].model(), WORKS[work].batch()["x"][:2]
    chained = nn.Sequential(*WORKS[work].chain(model))
    torch.testing.assert_close(chained(x), model(x))
