"""Works of real runs beside those of the benchmarks: two of FlexFlow's workloads, as small as two cores like them."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.search.workloads.recurrent import TIME, Sequences
from benchmarks.works.table import WORKS as BENCHED
from benchmarks.works.table import class_loss, examples, texts, token_loss
from benchmarks.works.work import Work
from examples.models.alexnet import AlexNet

# Images of the least side: most parameters are in the fully connected layers, as in the whole AlexNet.
SIDE, IMAGES = 64, 16
WIDTH, WORDS, TEXTS = 256, 10_000, 8


def _units(model: nn.Module) -> list[nn.Module]:
    """The layers that FSDP gathers one by one."""
    return [each for each in model.modules() if isinstance(each, nn.Linear | nn.LSTM)]


WORKS: dict[str, Work] = {
    **BENCHED,
    "alexnet": Work(
        make=partial(AlexNet, 1000, SIDE, dropout=0.0),
        make_batch=partial(examples, IMAGES, (3, SIDE, SIDE), 1000),
        loss_fn=class_loss,
        columns=["linears.0"],
        rows=["linears.1"],
        tables=["linears.0.weight", "linears.0.bias", "linears.2.weight", "linears.2.bias"],
    ),
    "rnnlm": Work(
        make=partial(Sequences, WIDTH, 2, WORDS, WORDS, last=False),
        make_batch=partial(texts, TEXTS, TIME, WORDS),
        loss_fn=token_loss,
        tables=["token.weight", "head.weight", "head.bias"],
    ),
}
