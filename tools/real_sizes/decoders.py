"""More families of `transformers` that predict the next token: joined matrices, blocks with parallel branches."""

from __future__ import annotations

from typing import Any

from tools.real_sizes.family import Family, on_meta, tokens_batch
from tools.real_sizes.language import attention_of, decoder, sizes_of

_FALCON: dict[str, Any] = {
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "vocab_size": 65024,
    "new_decoder_architecture": True,
    "tie_word_embeddings": True,
}
_PARALLEL = 1  # attention and MLP side by side: one region

DECODERS = (
    decoder(
        "Phi-3 mini",
        "2404.14219, section 2",
        "Phi3",
        32,
        sizes_of(3072, 8192, 32, 32, 32064),
        columns=("*.qkv_proj", "*.gate_up_proj"),
    ),
    decoder(
        "Phi-4 mini",
        "2503.01743, section 2",
        "Phi3",
        32,
        sizes_of(3072, 8192, 24, 8, 200064, tied=True),
        columns=("*.qkv_proj", "*.gate_up_proj"),
        tables=("model.embed_tokens",),
        tied=("model.embed_tokens",),
    ),
    decoder(
        "GLM-4 9B",
        "2406.12793, section 2",
        "Glm4",
        40,
        sizes_of(4096, 13696, 32, 2, 151552, head_dim=128, attention_bias=True),
        columns=("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_up_proj"),
        tensor=2,
    ),
    Family(
        "MPT 7B",
        "huggingface.co/mosaicml/mpt-7b",
        lambda layers, tokens: on_meta(
            *("Mpt", "MptForCausalLM"),
            d_model=4096,
            n_heads=32,
            expansion_ratio=4,
            vocab_size=50432,
            n_layers=layers,
            max_seq_len=tokens,
            use_cache=False,
        ),
        tokens_batch,
        32,
        4096,
        attention_of(4096),
        {"*norm*": 0},
        products=6,
        columns=("*.Wqkv", "*.up_proj"),
        rows=("*.out_proj", "*.down_proj"),
        tables=("transformer.wte",),
        tied=("transformer.wte",),
        blocks=("transformer.blocks.*",),
    ),
    decoder(
        "Falcon 40B",
        "2311.16867, table 13",
        "Falcon",
        60,
        _FALCON,
        columns=("*.query_key_value", "*.dense_h_to_4h"),
        rows=("*.self_attention.dense", "*.dense_4h_to_h"),
        tables=("transformer.word_embeddings",),
        tied=("transformer.word_embeddings",),
        passes={"*ln_*": 0, "*.bias": 0},
        blocks=("transformer.h.*",),
        regions=_PARALLEL,
    ),
    Family(
        "GPT-J 6B",
        "huggingface.co/EleutherAI/gpt-j-6b",
        lambda layers, tokens: on_meta(
            "GPTJ", "GPTJForCausalLM", n_layer=layers, n_positions=tokens, use_cache=False
        ),
        tokens_batch,
        28,
        4096,
        attention_of(4096),
        {"*wte*": 0, "*ln_*": 0, "*.bias": 0},
        products=6,
        columns=("*.q_proj", "*.k_proj", "*.v_proj", "*.fc_in"),
        rows=("*.out_proj", "*.fc_out"),
        tables=("transformer.wte", "lm_head"),
        blocks=("transformer.h.*",),
        regions=_PARALLEL,
    ),
    decoder(
        "Command R 35B",
        "huggingface.co/CohereForAI/c4ai-command-r-v01",
        "Cohere",
        40,
        sizes_of(8192, 22528, 64, 64, 256000, tied=True),
        tables=("model.embed_tokens",),
        tied=("model.embed_tokens",),
        regions=_PARALLEL,
    ),
    decoder(
        "GPT-OSS 20B",
        "2508.10925, table 1",
        "GptOss",
        24,
        {
            **sizes_of(2880, 2880, 64, 8, 201088, head_dim=64),
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
        passes={"*embed_tokens*": 0, "*norm*": 0, "*.bias": 0, "*_bias": 0},
        products=6,
        chosen=(4, 32),
        columns=("*.q_proj", "*.k_proj", "*.v_proj"),
        rows=("*.o_proj",),
        experts=("*.experts.*",),
    ),
)
