"""Families of `transformers` that are no decoders alone: BERT, T5, ViT and Whisper at published sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tools.real_sizes.family import Batch, Family, on_meta, tokens_batch

_PATCHES = (224 // 16) ** 2
# Whisper: positions of 30 s of sound behind the two convolutions, and before the second of them.
_SOUND, _FRAMES = 1500, 3000


# What BERT and ViT, Whisper and BART have in common.
_LARGE: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}


def _two_halves(layers: int, heads: int, inner: int) -> dict[str, Any]:
    """Sizes of an encoder and a decoder that share the layers."""
    own = {"layers": layers // 2, "attention_heads": heads, "ffn_dim": inner}
    return {f"{half}_{name}": x for half in ("encoder", "decoder") for name, x in own.items()}


def _bert(layers: int, tokens: int) -> nn.Module:
    return on_meta(
        *("Bert", "BertForMaskedLM"),
        **_LARGE,
        vocab_size=30522,
        num_hidden_layers=layers,
        max_position_embeddings=tokens,
    )


def _t5(layers: int, tokens: int) -> nn.Module:
    return on_meta(
        *("T5", "T5ForConditionalGeneration"),
        vocab_size=32128,
        d_model=1024,
        d_kv=128,
        d_ff=16384,
        num_heads=32,
        num_layers=layers // 2,
        decoder_start_token_id=0,
        use_cache=False,
    )


def _vit(layers: int, tokens: int) -> nn.Module:
    head = "ViTForImageClassification"
    return on_meta("ViT", head, **_LARGE, num_hidden_layers=layers, num_labels=1000)


def _images(sequences: int, tokens: int) -> Batch:
    pixels = torch.empty(sequences, 3, 224, 224, device="meta")
    return {
        "pixel_values": pixels,
        "labels": torch.empty(sequences, dtype=torch.long, device="meta"),
    }


def _whisper(layers: int, tokens: int) -> nn.Module:
    return on_meta(
        *("Whisper", "WhisperForConditionalGeneration"),
        vocab_size=51866,
        num_mel_bins=128,
        d_model=1280,
        use_cache=False,
        **_two_halves(layers, 20, 5120),
        max_target_positions=tokens,
    )


def _sounds(sequences: int, tokens: int) -> Batch:
    features = torch.empty(sequences, 128, _FRAMES, device="meta")
    labels = torch.empty(sequences, tokens, dtype=torch.long, device="meta")
    return {"input_features": features, "labels": labels}


def _whisper_attention(layers: int, tokens: int) -> int:
    """Encoder: sound by sound; decoder: text by text, and text by sound."""
    return layers // 2 * 1280 * (_SOUND * _SOUND + tokens * tokens + tokens * _SOUND)


def _bart(layers: int, tokens: int) -> nn.Module:
    return on_meta(
        *("Bart", "BartForConditionalGeneration"),
        vocab_size=50265,
        d_model=1024,
        dropout=0.0,
        use_cache=False,
        **_two_halves(layers, 16, 4096),
        max_position_embeddings=tokens,
    )


def _deberta(layers: int, tokens: int) -> nn.Module:
    return on_meta(
        *("DebertaV2", "DebertaV2ForMaskedLM"),
        **_LARGE,
        vocab_size=128100,
        num_hidden_layers=layers,
        max_position_embeddings=tokens,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
    )


ENCODERS = (
    Family(
        "BERT-large",
        "1810.04805, section 3",
        _bert,
        tokens_batch,
        24,
        1024,
        lambda layers, tokens: layers * tokens * tokens * 1024,
        {"*position_embeddings*": 0, "*token_type_embeddings*": 0, "*LayerNorm*": 0, "*.bias": 0},
        products=6,
        columns=("*.query", "*.key", "*.value", "*.intermediate.dense"),
        rows=("*.output.dense",),
        tables=("bert.embeddings.word_embeddings",),
        tied=("bert.embeddings.word_embeddings",),
        blocks=("bert.encoder.layer.*",),
    ),
    Family(
        "T5-3B",
        "1910.10683, section 3.7.1",
        _t5,
        tokens_batch,
        48,
        1024,
        lambda layers, tokens: layers // 2 * 3 * tokens * tokens * 4096,
        {"*relative_attention_bias*": 0, "*norm*": 0},
        products=6,
        columns=("*.q", "*.k", "*.v", "*.wi"),
        rows=("*.o", "*.wo"),
        tables=("shared",),
        tied=("shared",),
        blocks=("encoder.block.*", "decoder.block.*"),
        regions=2.5,
        ends=4,
        # The encoder's output goes along with the decoder; so do the biases of positions, and the table once more.
        crossing=lambda tokens: (tokens * 1024,) * 5,
        once=lambda tokens: 3 * 32 * tokens * tokens + 32128 * 1024,
    ),
    Family(
        "ViT-L/16",
        "2010.11929, table 1",
        _vit,
        _images,
        24,
        1024,
        lambda layers, tokens: layers * (_PATCHES + 1) ** 2 * 1024,
        {
            "*position_embeddings*": 0,
            "*cls_token*": 0,
            "*patch_embeddings*": _PATCHES,
            "classifier*": 1,
            "*": _PATCHES + 1,
        },
        positions=lambda tokens: _PATCHES + 1,
        columns=("*.q_proj", "*.k_proj", "*.v_proj", "*.fc1"),
        rows=("*.o_proj", "*.fc2"),
        ends=0,
        blocks=("vit.layers.*",),
    ),
    Family(
        "Whisper large-v3",
        "2212.04356, table 1",
        _whisper,
        _sounds,
        64,
        1280,
        _whisper_attention,
        {
            "*embed_positions*": 0,
            "*norm*": 0,
            "*encoder_attn.k_proj*": _SOUND,
            "*encoder_attn.v_proj*": _SOUND,
            "*encoder.conv1*": _FRAMES,
            "*encoder.*": _SOUND,
        },
        tensor=1,
        tied=("model.decoder.embed_tokens",),
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
        # Half the encoder and more of it, then its output along with the decoder.
        crossing=lambda tokens: (_SOUND * 1280,) * 3 + (tokens * 1280,),
    ),
    Family(
        "BART-large",
        "1910.13461, section 4",
        _bart,
        tokens_batch,
        24,
        1024,
        lambda layers, tokens: layers // 2 * 3 * tokens * tokens * 1024,
        {"*embed_positions*": 0, "*norm*": 0, "*.bias": 0},
        columns=("*.q_proj", "*.k_proj", "*.v_proj", "*.fc1"),
        rows=("*.out_proj", "*.fc2"),
        tables=("model.shared",),
        tied=("model.shared",),
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
        regions=2.5,
        ends=4,
        # The encoder's output goes along with the decoder.
        crossing=lambda tokens: (tokens * 1024,) * 5,
        # The table once more, for the decoder.
        once=lambda tokens: 50265 * 1024,
    ),
    Family(
        "DeBERTa-v3-large",
        "2111.09543, section 5.1",
        _deberta,
        tokens_batch,
        24,
        1024,
        # Content to content, content to position and position to content.
        lambda layers, tokens: layers * tokens * (tokens + 512) * 1024,
        {"*rel_embeddings*": 0, "*LayerNorm*": 0, "*.bias": 0},
        products=6,
        columns=("*.query_proj", "*.key_proj", "*.value_proj", "*.intermediate.dense"),
        rows=("*.output.dense",),
        tables=("deberta.embeddings.word_embeddings",),
        tied=("deberta.embeddings.word_embeddings",),
        blocks=("deberta.encoder.layer.*",),
    ),
)
