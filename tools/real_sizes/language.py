"""Families of `transformers` that predict the next token, at the sizes that their authors published."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tools.real_sizes.family import Family, on_meta, tokens_batch

_QKV = ("*.q_proj", "*.k_proj", "*.v_proj")
_GATED = {"columns": (*_QKV, "*.gate_proj", "*.up_proj"), "rows": ("*.o_proj", "*.down_proj")}
_TABLES = ("model.embed_tokens", "lm_head")
_PASSES: dict[str, int | None] = {"*embed_tokens*": 0, "*norm*": 0, "*.bias": 0}
# The head's matrix is the table of tokens.
_TIED: dict[str, int | None] = {"*norm*": 0, "*.bias": 0}


def _build(name: str, sizes: dict[str, Any], layers: int, tokens: int) -> nn.Module:
    own = {"num_hidden_layers": layers, "max_position_embeddings": tokens, "use_cache": False}
    return on_meta(name, f"{name}ForCausalLM", **own, **sizes)


def attention_of(width: int) -> Callable[[int, int], int]:
    """Every position looks at every other one, in heads that are `width` wide together."""
    return lambda layers, tokens: layers * tokens * tokens * width


def decoder(
    name: str,
    source: str,
    model: str,
    layers: int,
    sizes: dict[str, Any],
    **more: Any,
) -> Family:
    """A decoder of `transformers`, `model` its class' name without "ForCausalLM"."""
    heads = sizes["num_attention_heads"]
    width = heads * sizes.get("head_dim", sizes["hidden_size"] // heads)
    given: dict[str, Any] = {
        "attention": attention_of(width),
        "passes": _TIED if sizes.get("tie_word_embeddings") else _PASSES,
        "tables": _TABLES,
        **_GATED,
        **more,
    }
    return Family(
        name,
        source,
        partial(_build, model, sizes),
        tokens_batch,
        layers,
        sizes["hidden_size"],
        **given,
    )


def sizes_of(
    hidden: int, inner: int, heads: int, kv: int, vocabulary: int, tied: bool = False, **more: Any
) -> dict[str, Any]:
    """The sizes of a decoder, by the names that configs have for them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "pad_token_id": None,
        **more,
    }


_SPARSE: dict[str, Any] = {
    "columns": _QKV,
    "rows": ("*.o_proj",),
    "experts": ("*.experts.*",),
}

LANGUAGE = (
    decoder(
        "Llama 3 8B",
        "2407.21783, table 3",
        "Llama",
        32,
        sizes_of(
            4096, 14336, 32, 8, 128256, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
        ),
    ),
    decoder(
        "Llama 3 70B",
        "2407.21783, table 3",
        "Llama",
        80,
        sizes_of(
            8192, 28672, 64, 8, 128256, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
        ),
    ),
    decoder(
        "Qwen2 7B",
        "2407.10671, table 1",
        "Qwen2",
        28,
        sizes_of(3584, 18944, 28, 4, 152064),
        tensor=4,
    ),
    decoder(
        "Qwen3 8B",
        "2505.09388, table 1",
        "Qwen3",
        36,
        sizes_of(4096, 12288, 32, 8, 151936, head_dim=128),
    ),
    decoder(
        "Mistral 7B",
        "2310.06825, table 1",
        "Mistral",
        32,
        sizes_of(4096, 14336, 32, 8, 32000, sliding_window=4096),
    ),
    decoder(
        "Gemma 2 9B",
        "2408.00118, table 1",
        "Gemma2",
        42,
        sizes_of(3584, 14336, 16, 8, 256128, tied=True, head_dim=256),
        products=6,
        tables=("model.embed_tokens",),
        tied=("model.embed_tokens",),
    ),
    decoder(
        "Phi-2",
        "huggingface.co/microsoft/phi-2",
        "Phi",
        32,
        sizes_of(2560, 10240, 32, 32, 51200, resid_pdrop=0.1),
        columns=(*_QKV, "*.fc1"),
        rows=("*.dense", "*.fc2"),
        # Attention and MLP side by side, each with a dropout of its own behind its sum.
        regions=1.5,
    ),
    decoder("OLMo 2 7B", "2501.00656, table 3", "Olmo2", 32, sizes_of(4096, 11008, 32, 32, 100352)),
    Family(
        "GPT-2 XL",
        "Radford et al. 2019, table 2",
        lambda layers, tokens: on_meta(
            *("GPT2", "GPT2LMHeadModel"),
            n_embd=1600,
            n_head=25,
            use_cache=False,
            n_layer=layers,
            n_positions=tokens,
        ),
        tokens_batch,
        48,
        1600,
        attention_of(1600),
        {"*wpe*": 0, "*ln_*": 0, "*.bias": 0},
        tied=("transformer.wte",),
        blocks=("transformer.h.*",),
        tensor=1,
    ),
    decoder(
        "GPT-NeoX 20B",
        "2204.06745, section 2.1",
        "GPTNeoX",
        44,
        {
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "vocab_size": 50432,
            "tie_word_embeddings": False,
        },
        columns=("*.query_key_value", "*.dense_h_to_4h"),
        rows=("*.attention.dense", "*.dense_4h_to_h"),
        tables=("gpt_neox.embed_in", "lm_head"),
        passes={"*embed_in*": 0, "*norm*": 0, "*.bias": 0},
        blocks=("gpt_neox.layers.*",),
        regions=1,  # attention and MLP side by side
    ),
    decoder(
        "Mixtral 8x7B",
        "2401.04088, table 1",
        "Mixtral",
        32,
        sizes_of(4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        chosen=(2, 8),
        **_SPARSE,
    ),
    decoder(
        "Qwen3 30B-A3B",
        "2505.09388, table 2",
        "Qwen3Moe",
        48,
        sizes_of(
            2048,
            6144,
            32,
            4,
            151936,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        chosen=(8, 128),
        tensor=4,
        **_SPARSE,
    ),
    decoder(
        "DeepSeek-V2 Lite",
        "2405.04434, appendix B",
        "DeepseekV2",
        27,
        {
            **sizes_of(2048, 10944, 16, 16, 102400, head_dim=64),
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        attention=attention_of(16 * 160),
        chosen=(6, 64),
        columns=("*.q_proj", "*.kv_b_proj", "*.gate_proj", "*.up_proj"),
        rows=("*.o_proj", "*.down_proj"),
        experts=("*.experts.*",),
    ),
)
