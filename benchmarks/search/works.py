"""Works of real runs beside those of the benchmarks: two of FlexFlow's workloads, as small as two cores like them."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from benchmarks.search.workloads.recurrent import TIME, Sequences
from benchmarks.works.table import WORKS as BENCHED
from benchmarks.works.table import examples, texts
from benchmarks.works.work import Work, class_loss, token_loss
from examples.models.alexnet import AlexNet

# Images of the least side: most parameters are in the fully connected layers, as in the whole AlexNet.
SIDE, IMAGES = 64, 16
WIDTH, WORDS, TEXTS = 256, 10_000, 8


def _units(model: nn.Module) -> list[nn.Module]:
    """The layers that FSDP gathers one by one."""
    return [each for each in model.modules() if isinstance(each, nn.Linear | nn.LSTM)]


class _Outputs(nn.Module):
    """What an LSTM layer puts out, without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: tuple[Tensor, object] = self.layer(x)
        return made[0]


def _alexnet_chain(model: nn.Module) -> list[nn.Module]:
    """Dropout of 0 is left out."""
    first, second, last = model.get_submodule("linears").children()
    features = list(model.get_submodule("features").children())
    return [*features, nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last]


def _sequences_chain(model: nn.Module) -> list[nn.Module]:
    """Layers that read whole sequences."""
    layers = model.get_submodule("stack.layers").children()
    return [model.get_submodule("token"), *map(_Outputs, layers), model.get_submodule("head")]


WORKS: dict[str, Work] = {
    **BENCHED,
    "alexnet": Work(
        make=partial(AlexNet, 1000, SIDE, dropout=0.0),
        make_batch=partial(examples, IMAGES, (3, SIDE, SIDE), 1000),
        loss_fn=class_loss,
        columns=["linears.0"],
        rows=["linears.1"],
        chain=_alexnet_chain,
        tables=["linears.0.weight", "linears.0.bias", "linears.2.weight", "linears.2.bias"],
    ),
    "rnnlm": Work(
        make=partial(Sequences, WIDTH, 2, WORDS, WORDS, last=False),
        make_batch=partial(texts, TEXTS, TIME, WORDS),
        loss_fn=token_loss,
        chain=_sequences_chain,
        tables=["token.weight", "head.weight", "head.bias"],
    ),
}
