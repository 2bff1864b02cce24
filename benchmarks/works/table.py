"""All works, in the size of the benchmarks (`WORKS`) and so small that tests can run them (`TINY`)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.works.llama import Llama
from benchmarks.works.models import Cells, Softmax, mlp, resnet
from benchmarks.works.transformers import BERT, GPT
from benchmarks.works.work import Batch, Work, class_loss, sgd, token_loss
from examples.models import wide_deep
from examples.models.recurrent import LanguageModel

LABELLED = 0.15  # of the tokens of a text are predicted by BERT (Devlin et al., arXiv 1810.04805)
IGNORED = -100
SWIGLU = ("blocks.*.feed.gate", "blocks.*.feed.up")


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"], batch["mask"])
    return cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED)


def examples(count: int, shape: tuple[int, ...], classes: int) -> Batch:
    return {"x": torch.randn(count, *shape), "y": torch.randint(classes, (count,))}


def texts(count: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (count, length + 1))
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def masked_texts(count: int, length: int, vocabulary: int) -> Batch:
    """Texts of different lengths; as many labels in each, so that parts of the batch count alike."""
    tokens = torch.randint(vocabulary, (count, length))
    lengths = torch.randint(length // 2, length + 1, (count, 1))
    mask = torch.arange(length) < lengths
    order = torch.rand(count, length).masked_fill(~mask, 2.0).argsort(1)
    chosen = order[:, : max(1, int(LABELLED * length / 2))]
    labels = torch.full_like(tokens, IGNORED).scatter(1, chosen, tokens.gather(1, chosen))
    return {"x": tokens.masked_fill(labels != IGNORED, 0), "mask": mask, "y": labels}


def mlp_work(width: int, layers: int, count: int) -> Work:
    return Work(
        make=partial(mlp, width, layers, 10),
        make_batch=partial(examples, count, (width,), 10),
        loss_fn=class_loss,
        columns=[str(each) for each in range(0, 2 * layers, 4)],
        rows=[str(each) for each in range(2, 2 * layers, 4)],
        blocks=lambda model: [each for each in model.children() if isinstance(each, nn.Linear)],
        chain=lambda model: list(model.children()),
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


def gpt_work(layers: int, width: int, length: int, count: int) -> Work:
    return Work(
        make=partial(GPT, layers, width, width // 64 or 2, length, 256),
        make_batch=partial(texts, count, length, 256),
        loss_fn=token_loss,
        blocks=blocks_of,
        columns=[*(f"blocks.*.attention.{each}" for each in "qkv"), "blocks.*.feed.up"],
        rows=["blocks.*.attention.proj", "blocks.*.feed.down"],
        tables=["head.weight"],
    )


def llama_work(
    width: int, hidden: int, length: int, count: int, vocabulary: int, tied: bool = False
) -> Work:
    """Four layers; 8 heads of queries, 4 of keys and values."""
    return Work(
        make=partial(Llama, 4, width, 8, 4, hidden, vocabulary, tied),
        make_batch=partial(texts, count, length, vocabulary),
        loss_fn=token_loss,
        blocks=blocks_of,
        columns=[*(f"blocks.*.attention.{each}" for each in "qkv"), *SWIGLU],
        rows=["blocks.*.attention.proj", "blocks.*.feed.down"],
        tables=["token.weight"] if tied else ["token.weight", "head.weight"],
    )


def mixtral_work(
    width: int,
    hidden: int,
    length: int,
    count: int,
    vocabulary: int,
    capacity: float | None = None,
) -> Work:
    """The same with 8 experts in each layer, two for each token."""
    return Work(
        make=partial(Llama, 4, width, 8, 4, hidden, vocabulary, experts=8),
        make_batch=partial(texts, count, length, vocabulary),
        loss_fn=token_loss,
        blocks=blocks_of,
        capacity=capacity,
        experts=["blocks.*.feed.gate_up", "blocks.*.feed.down"],
    )


def bert_work(layers: int, width: int, length: int, count: int, vocabulary: int) -> Work:
    return Work(
        make=partial(BERT, layers, width, width // 64 or 2, length, vocabulary),
        make_batch=partial(masked_texts, count, length, vocabulary),
        loss_fn=masked_loss,
        blocks=blocks_of,
        columns=[*(f"blocks.*.attention.{each}" for each in "qkv"), "blocks.*.feed.up"],
        rows=["blocks.*.attention.proj", "blocks.*.feed.down"],
        tables=["token.weight", "head.weight", "head.bias"],
    )


def resnet_work(depths: tuple[int, ...], width: int, size: int, count: int) -> Work:
    return Work(
        make=partial(resnet, depths, width, 100),
        make_batch=partial(examples, count, (3, size, size), 100),
        loss_fn=class_loss,
        optimizer=sgd,
        blocks=blocks_of,
        own_statistics=True,
    )


def lstm_work(
    vocabulary: int, width: int, layers: int, length: int, count: int, fused: bool = True
) -> Work:
    return Work(
        make=partial(LanguageModel if fused else Cells, vocabulary, width, layers),
        make_batch=partial(texts, count, length, vocabulary),
        loss_fn=token_loss,
    )


def wide_deep_work(rows: int, width: int, hidden: int, count: int) -> Work:
    return Work(
        make=partial(wide_deep.WideDeep, rows, width=width, hidden=(hidden, hidden // 2)),
        make_batch=partial(wide_deep.batch, count, 1, rows),
        loss_fn=wide_deep.loss,  # type: ignore[arg-type]
        tables=["wide.weight", "deep.weight"],
    )


def softmax_work(inputs: int, width: int, classes: int, count: int) -> Work:
    return Work(
        make=partial(Softmax, inputs, width, classes),
        make_batch=partial(examples, count, (inputs,), classes),
        loss_fn=class_loss,
        optimizer=sgd,
        chain=lambda model: [
            *model.get_submodule("backbone").children(),
            model.get_submodule("head"),
        ],
        tables=["head.weight"],
    )


WORKS: dict[str, Work] = {
    "mlp": mlp_work(width=1024, layers=4, count=256),
    "mlp3": mlp_work(width=1024, layers=4, count=258),  # divides by 3
    "mlp_small": mlp_work(width=64, layers=4, count=64),
    "gpt": gpt_work(layers=6, width=512, length=256, count=8),
    "gpt8": gpt_work(layers=8, width=512, length=128, count=16),  # into 2 or 4 equal parts
    "bert": bert_work(layers=6, width=512, length=128, count=8, vocabulary=8192),
    "llama": llama_work(width=256, hidden=688, length=512, count=8, vocabulary=8192),
    "llama_tied": llama_work(256, hidden=688, length=512, count=8, vocabulary=8192, tied=True),
    # It sends up to 1.15 even shares in its first 40 steps.
    "mixtral": mixtral_work(256, hidden=896, length=128, count=8, vocabulary=4096, capacity=1.25),
    "resnet50": resnet_work((3, 4, 6, 3), width=64, size=64, count=16),
    "lstm": lstm_work(vocabulary=1000, width=128, layers=2, length=32, count=16),
    "lstm_cells": lstm_work(1000, width=128, layers=2, length=32, count=16, fused=False),
    "wide_deep": wide_deep_work(rows=2_000_000, width=16, hidden=512, count=1024),
    "split_softmax": softmax_work(inputs=256, width=128, classes=200_000, count=64),
}

TINY: dict[str, Work] = {
    "mlp": mlp_work(width=16, layers=2, count=8),
    "mlp3": mlp_work(width=16, layers=2, count=6),
    "mlp_small": mlp_work(width=8, layers=2, count=4),
    "gpt": gpt_work(layers=2, width=32, length=16, count=8),
    "gpt8": gpt_work(layers=4, width=32, length=16, count=8),
    "bert": bert_work(layers=2, width=32, length=16, count=4, vocabulary=64),
    "llama": llama_work(width=32, hidden=64, length=16, count=4, vocabulary=64),
    "llama_tied": llama_work(32, hidden=64, length=16, count=4, vocabulary=64, tied=True),
    "mixtral": mixtral_work(width=32, hidden=32, length=16, count=4, vocabulary=64),
    "resnet50": resnet_work((1, 1), width=4, size=16, count=4),
    "lstm": lstm_work(vocabulary=32, width=16, layers=1, length=8, count=4),
    "lstm_cells": lstm_work(32, width=16, layers=1, length=8, count=4, fused=False),
    "wide_deep": wide_deep_work(rows=64, width=4, hidden=8, count=8),
    "split_softmax": softmax_work(inputs=8, width=8, classes=64, count=8),
}
