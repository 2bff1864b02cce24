"""Steps of large models, captured on the meta device: they take no memory, and nothing of them is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import transformers
from torch import nn

import weft
from benchmarks.works.work import class_loss
from examples.gpt_model import GPT, loss_fn
from examples.models.resnet import ResNet
from weft.planning.stored_step import StoredStep

AdamW = partial(torch.optim.AdamW, lr=1e-4)
# bfloat16 under autocast, as these models are trained.
HALF = weft.Strategy(precision="bf16")


@final
@dataclass(frozen=True)
class Decoder:
    """The sizes of a GPT in this repository's form.

    Attributes:
        layers: how many blocks.
        width: of the activations between them.
        heads: of attention.
        length: tokens of a sequence.
        vocabulary: of its tokens.
    """

    layers: int
    width: int
    heads: int
    length: int = 1024
    vocabulary: int = 50304


GPT_96 = Decoder(96, 12288, 96, 2048, 51200)  # Brown et al., arXiv 2005.14165, table 2.1
GPT_24 = Decoder(24, 2048, 16, 1024, 51200)
OPT_350M = Decoder(24, 1024, 16, 2048, 50272)  # Zhang et al., arXiv 2205.01068, table 1
GPT_8 = Decoder(8, 1024, 16)


def gpt(sizes: Decoder, sequences: int) -> weft.Job:
    """A GPT, trained with AdamW."""
    with torch.device("meta"):
        model = GPT(sizes.layers, sizes.width, sizes.heads, sizes.length, sizes.vocabulary)
        tokens = torch.empty(sequences, sizes.length, dtype=torch.int64)
    return weft.Job(model, loss_fn, AdamW(model.parameters()), {"x": tokens, "y": tokens})


@final
@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a Llama, with 8 heads of keys and values and a vocabulary of 128,256 tokens.

    Attributes:
        layers: how many.
        width: of the activations between them.
        hidden: of the feed-forward nets.
        heads: of queries.
    """

    layers: int
    width: int
    hidden: int
    heads: int


# "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3.
LLAMA_8B = LlamaSizes(32, 4096, 14336, 32)
LLAMA_70B = LlamaSizes(80, 8192, 28672, 64)
LLAMA_405B = LlamaSizes(126, 16384, 53248, 128)


def llama(sizes: LlamaSizes, sequences: int, tokens: int = 8192) -> weft.Job:
    """A Llama of `transformers`, trained with AdamW."""
    config = transformers.LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.empty(sequences, tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return weft.Job(model, _own_loss, AdamW(model.parameters()), batch)


def llama_405b() -> weft.Job:
    """Llama 3 405B and 2,048 sequences of 8,192 tokens, as table 4 has it on 16,384 ranks.

    weft capture benchmarks.models:llama_405b --strategy benchmarks/llama_405b.yaml -o llama.graph.gz
    weft simulate llama.graph.gz --strategy benchmarks/llama_405b.yaml --topology h100x16384 --grid 2048x8

    The grid is tensor 8 x pipeline 16 x data 128; published are 380 TFLOP/s on each GPU.
    """
    return llama(LLAMA_405B, 2048)


def _own_loss(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


def mlp(width: int, layers: int, samples: int) -> weft.Job:
    """Linear layers with ReLU between them, trained with AdamW."""
    with torch.device("meta"):
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*parts[:-1])
        batch = {
            "x": torch.empty(samples, width),
            "y": torch.empty(samples, dtype=torch.int64),
        }
    return weft.Job(model, class_loss, AdamW(model.parameters()), batch)


def wide_resnet(channels: int, widening: int, images: int) -> weft.Job:
    """A Wide-ResNet of 50 layers, trained with AdamW, as Alpa's (arXiv 2201.12023, section 8.1)."""
    with torch.device("meta"):
        model = ResNet(classes=1024, width=channels, widening=widening)
        batch = {
            "x": torch.empty(images, 3, 224, 224),
            "y": torch.empty(images, dtype=torch.int64),
        }
    return weft.Job(model, class_loss, AdamW(model.parameters()), batch)


def stored(job: weft.Job, strategy: weft.Strategy | None = None) -> StoredStep:
    """The captured step, once for all searches and simulations of it, in the precision of a strategy."""
    return job.stored(strategy=strategy or weft.data_parallel())
