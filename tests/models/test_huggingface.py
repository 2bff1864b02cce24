"""Families of `transformers`, untouched, train under every kind of strategy as on one device."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

from tools.huggingface_models import CASES
from tools.model_cases import Comparison, settings, verified


def test_every_family_is_there() -> None:
    assert " ".join(CASES) == (
        "llama qwen2 qwen3 mistral gemma2 gpt2 gpt-neox opt phi bert mixtral qwen3-moe olmoe t5 vit mamba"
    )


# The whole matrix takes minutes: `python -m tools.models`. Here each strategy meets different kinds of models.
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", "automatic, 4"),
        ("gemma2", "tensor, 2"),
        ("gpt2", "tensor, 2"),
        ("bert", "hybrid, 2×2"),
        ("qwen3-moe", "tensor, 2"),
        ("t5", "automatic, 2"),
        ("mamba", "data, 2"),
    ],
)
def test_three_steps_equal_plain_pytorch(name: str, strategy: str) -> None:
    case = CASES[name]
    found = Comparison(case).difference(*settings(case.layouts)[strategy])
    assert max(found.loss, found.state) < 1e-11, found


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("llama", "pipeline, 2"), ("gpt2", "hybrid, 2×2"), ("bert", "data, 2"), ("t5", "tensor, 2")],
)
def test_a_check_agrees(name: str, strategy: str) -> None:
    case = CASES[name]
    found = verified(case, *settings(case.layouts)[strategy])
    gradients = [each for each in found.compared if each.kind == "gradient"]
    # Gradients that are zero but for rounding, as those of keys' biases are, say nothing.
    sharp = [each for each in gradients if each.allowed < 1e-2 * each.scale]
    assert len(sharp) > 0.8 * len(gradients)
