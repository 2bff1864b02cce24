"""The papers' models train under every kind of strategy as on one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import weft
from examples.models import inception, recurrent, resnet
from tools.model_cases import B, Comparison, S, settings, verified
from tools.paper_models import CASES


# All models under all strategies take many minutes: `python -m tools.models`.
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("alexnet", "hybrid, 2×2"),
        ("rnntc", "data, 4"),
        ("nmt", "tensor, 2"),
        ("wide & deep", "hybrid, 2×2"),
        ("faces", "automatic, 2"),
    ],
)
def test_three_steps_equal_plain_pytorch(name: str, strategy: str) -> None:
    case = CASES[name]
    found = Comparison(case).difference(*settings(case.layouts)[strategy])
    assert max(found.loss, found.state) < 1e-11, found


# In float32, with gradients, buffers and states; the wrong step is caught in tests/program/verification/test_verify.py.
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("alexnet", "data, 2"),
        ("rnnlm", "pipeline, 2"),
        ("rnntc", "data, 2"),
        ("nmt", "pipeline, 2"),
        ("wide & deep", "hybrid, 2×2"),
        ("faces", "tensor, 2"),
    ],
)
def test_a_check_agrees(name: str, strategy: str) -> None:
    case = CASES[name]
    found = verified(case, *settings(case.layouts)[strategy])
    gradients = [each for each in found.compared if each.kind == "gradient"]
    # Gradients that are zero but for rounding, as those of keys' biases are, say nothing.
    sharp = [each for each in gradients if each.allowed < 1e-2 * each.scale]
    assert len(sharp) > 0.8 * len(gradients)


def test_each_rank_looks_up_its_own_rows_only() -> None:
    case = CASES["wide & deep"]
    grid, strategy = settings(case.layouts)["tensor, 4"]
    with weft.local_world(4):
        program = Comparison(case).compile(grid, strategy)
        program.close()
    tables = [v for v in program.graph.values.values() if v.shape in ((50, 4), (50, 1))]
    assert len(tables) >= 8  # parameters, states and gradients
    assert {v.layout.sbp for v in tables if v.layout} == {(S(0),)}


def test_dropout_between_lstm_layers_is_the_same_on_any_number_of_ranks() -> None:
    def losses(ranks: int, dropout: float) -> list[float]:
        torch.manual_seed(0)
        model = recurrent.Classifier(12, 4, 8, 2, dropout)
        batches = [recurrent.texts(4, seed, 3, 12, 4) for seed in range(2)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with weft.local_world(ranks):
            program = weft.compile(
                model,
                recurrent.class_loss,
                optimizer,
                batches[0],
                placement=weft.placement("cpu", range(ranks)),
                strategy=weft.Strategy(batch={"*": S(0)}, parameters={"*": B}),
                seed=3,
            )
            found = [program.step(batch).item() for batch in batches]
            program.close()
        return found

    alone = losses(1, 0.5)
    assert losses(2, 0.5) == pytest.approx(alone, rel=1e-6)
    assert losses(1, 0.0) != pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet-50", 25_557_032), ("resnet-101", 44_549_160), ("inception-v3", 23_834_568)],
)
def test_real_sizes_have_the_papers_parameters(name: str, count: int) -> None:
    build = {
        "resnet-50": resnet.ResNet,
        "resnet-101": partial(resnet.ResNet, resnet.RESNET_101),
        "inception-v3": inception.Inception,
    }[name]
    with torch.device("meta"):
        model = build()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
