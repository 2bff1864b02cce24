"""Hugging Face families as they are, tiny and from their configs: nothing is downloaded.

Each entry names a config class and a model class of `transformers`, the sizes that make it tiny, and the linear layers
that Megatron-LM's pattern splits by columns and by rows. The models are not touched: `weft.compile` takes them as
`transformers` builds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

import weft

Batch = dict[str, torch.Tensor]

S = weft.split
VOCABULARY, TIME = 64, 8


def linears(columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, Any]:
    """Megatron-LM's layouts: `columns` are linear layers with split outputs, `rows` with split inputs."""
    return dict(weft.tensor_parallel(columns, rows).parameters)


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_GATED = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_QKV = ("*.q_proj", "*.k_proj", "*.v_proj")
_LLAMA = linears((*_QKV, "*.gate_proj", "*.up_proj"), ("*.o_proj", "*.down_proj"))
# Attention as Megatron-LM does, and whole experts on each rank.
_EXPERTS = {**linears(_QKV, ("*.o_proj",)), "*.experts.*": S(0)}


def tokens(n: int, seed: int) -> Batch:
    """Tokens int64 [n, TIME]; the labels are the tokens, with the first two ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (n, TIME), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def masked_tokens(n: int, seed: int) -> Batch:
    """The same with an attention mask that leaves out the end of every other row."""
    batch = tokens(n, seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, -2:] = 0
    return {**batch, "attention_mask": mask}


def pairs(n: int, seed: int) -> Batch:
    """Source and target tokens of an encoder-decoder."""
    return {"input_ids": tokens(n, seed + 100)["input_ids"], "labels": tokens(n, seed)["labels"]}


def images(n: int, seed: int) -> Batch:
    """Images [n, 3, 16, 16] and classes."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(n, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (n,), generator=generator)}


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        config, model: names of classes of `transformers`.
        sizes: arguments of the config.
        layouts: parameters that tensor parallelism splits, by pattern.
        batch: makes a batch from its size and a seed.
    """

    config: str
    model: str
    sizes: dict[str, Any]
    layouts: dict[str, Any] = field(default_factory=lambda: _LLAMA)
    batch: Callable[[int, int], Batch] = masked_tokens

    def build(self) -> nn.Module:
        """The model with random parameters, in torch's default dtype."""
        config = getattr(transformers, self.config)(**self.sizes)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.to(torch.get_default_dtype()).train()


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the family computes itself from the labels."""
    found: torch.Tensor = model(**batch).loss
    return found


_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Its linear layers are `Conv1D`, whose weights are [inputs, outputs].
_GPT2_LAYOUTS = {
    f"*.{layer}.{name}": S(dim)
    for layer, name, dim in (
        ("c_attn", "weight", 1),
        ("c_attn", "bias", 0),
        ("c_fc", "weight", 1),
        ("c_fc", "bias", 0),
        ("c_proj", "weight", 0),
    )
}
_BERT_LIKE = {
    **_SIZES,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _GATED),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", _GATED),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {**_GATED, "head_dim": 8}),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**_GATED, "sliding_window": 4}),
    "gemma2": Family(
        "Gemma2Config", "Gemma2ForCausalLM", {**_GATED, "head_dim": 8, "sliding_window": 4}
    ),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", _GPT2, _GPT2_LAYOUTS),
    "gpt-neox": Family(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**_SIZES, "intermediate_size": 64},
        linears(("*.query_key_value", "*.dense_h_to_4h"), ("*.attention.dense", "*.dense_4h_to_h")),
    ),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        {**_SIZES, **_ENDS, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
        linears((*_QKV, "*.fc1"), ("*.out_proj", "*.fc2")),
    ),
    "phi": Family(
        "PhiConfig",
        "PhiForCausalLM",
        {**_SIZES, "intermediate_size": 64},
        linears((*_QKV, "*.fc1"), ("*.dense", "*.fc2")),
    ),
    "bert": Family(
        "BertConfig",
        "BertForMaskedLM",
        _BERT_LIKE,
        linears(("*.query", "*.key", "*.value", "*.intermediate.dense"), ("*.output.dense",)),
    ),
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
        _EXPERTS,
    ),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **_GATED,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        _EXPERTS,
    ),
    "olmoe": Family(
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {**_GATED, "num_experts": 4, "num_experts_per_tok": 2},
        _EXPERTS,
    ),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        linears(("*.q", "*.k", "*.v", "*.wi"), ("*.o", "*.wo")),
        pairs,
    ),
    "vit": Family(
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 5,
        },
        linears((*_QKV, "*.fc1"), ("*.o_proj", "*.fc2")),
        images,
    ),
    "mamba": Family(
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "time_step_rank": 4,
        },
        linears(("*.in_proj",), ("*.out_proj",)),
        tokens,
    ),
}
