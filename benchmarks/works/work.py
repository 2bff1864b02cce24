"""What a work is: everything that a system needs to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

Batch = dict[str, Tensor]

AdamW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Momentum; fused where it can be: DTensor has no rule for that kernel."""
    every = list(parameters)
    fused = not any(isinstance(each, DTensor) for each in every)
    return torch.optim.SGD(every, lr=1e-2, momentum=0.9, fused=fused)


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a batch {"x": inputs, "y": classes}."""
    return cross_entropy(model(batch["x"]), batch["y"])


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The same of all tokens, both of shape (batch, length)."""
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@dataclass(frozen=True)
class Work:
    """A model, a batch, a loss and an optimizer of a single device.

    Attributes:
        make: the model with fresh weights; call `model` instead, which seeds them.
        make_batch: the whole batch; call `batch` instead.
        loss_fn: (model, batch) to the mean loss over the samples. The parts of a batch that ranks
            take count alike in it, so that the mean over ranks is the mean over samples.
        optimizer: of some parameters.
        blocks: the parts of the model that FSDP shards and gathers one by one.
        chain: modules that make the model's forward of "x" when they are called in a row; pipelines of peers are cut
            between them. Where there are none, they are cut between blocks.
        columns: patterns of the linear layers whose outputs tensor parallelism splits.
        rows: of those whose inputs it splits.
        tables: patterns of the parameters whose rows (vocabulary, classes) are split.
        experts: of those that hold all experts of a mixture in their first dimension.
        capacity: rows that a rank may send to the experts of another, in shares of an even routing.
        own_statistics: whether ranks of DDP and FSDP train with other statistics than a single
            device (BatchNorm), so that their losses are those of another program.
    """

    make: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = AdamW
    blocks: Callable[[nn.Module], Sequence[nn.Module]] = lambda model: ()
    chain: Callable[[nn.Module], Sequence[nn.Module]] = lambda model: ()
    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    tables: Sequence[str] = ()
    experts: Sequence[str] = ()
    capacity: float | None = None
    own_statistics: bool = False

    def model(self) -> nn.Module:
        """The model, with the same weights whenever and wherever it is called."""
        torch.manual_seed(0)
        return self.make()

    def batch(self) -> Batch:
        """The whole batch, the same wherever it is called."""
        torch.manual_seed(1)
        return self.make_batch()
