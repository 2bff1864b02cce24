"""Mixtures of experts of `transformers`, with its default implementation, as on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

import weft
from examples.models import huggingface
from tools.model_cases import GRID, PAIR, Case, Comparison
from weft.errors import CaptureError

S, B = weft.split, weft.broadcast
SIZES = huggingface._GATED
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "mixtral": huggingface.FAMILIES["mixtral"],
    "qwen2-moe": huggingface.Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**SIZES, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "deepseek-v3": huggingface.Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **SIZES,
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "v_head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
        },
    ),
    # Experts with biases, gate and up interleaved.
    "gpt-oss": huggingface.Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
}
EXPERT = weft.expert_parallel(["*.experts.*"])
BOTH = weft.Strategy({"*": S(0)}, {"*.experts.*": (B, S(0)), "*": B})
ZERO = replace(weft.data_parallel(), zero=weft.Zero(3))


def case(family: huggingface.Family) -> Case:
    return Case(family.build, huggingface.loss, family.batch, {})


@pytest.mark.parametrize(
    ("name", "grid", "strategy"),
    [
        ("mixtral", GRID, BOTH),
        ("qwen2-moe", PAIR, ZERO),
        ("deepseek-v3", PAIR, EXPERT),
        ("gpt-oss", PAIR, EXPERT),
    ],
)
def test_three_steps_equal_plain_pytorch(name: str, grid: Any, strategy: weft.Strategy) -> None:
    found = Comparison(case(FAMILIES[name])).difference(grid, strategy)
    assert max(found.loss, found.state) < 1e-11, found


def test_a_loop_over_experts_is_refused() -> None:
    sizes = {**FAMILIES["mixtral"].sizes, "experts_implementation": "eager"}
    loop = replace(FAMILIES["mixtral"], sizes=sizes)
    with pytest.raises(CaptureError, match='experts_implementation="grouped_mm", the default'):
        Comparison(case(loop)).difference(PAIR, weft.data_parallel())
