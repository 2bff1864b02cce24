"""LoRA: a trained GPT is frozen, and narrow matrices beside its own learn another kind of text.

    weft run -n 2 examples/lora.py --strategy tensor

The GPT learns the source text of Python's standard library, data parallel. Then it has to predict the same text with
upper and lower case exchanged. Tensor parallel: frozen matrices and those beside them are split alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from example_text import library_text, text_batches
from gallery import Plain, Run
from gpt_model import GPT, loss_fn
from torch import Tensor, nn

import weft

COLUMNS, ROWS = ("qkv", "up"), ("proj", "down")


class Adapted(nn.Module):
    """A frozen linear layer and what two narrow matrices add (Hu et al. 2021): [..., inputs] to [..., outputs]."""

    def __init__(self, inner: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.inner = inner
        self.narrow = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.wide = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.narrow.T @ self.wide.T


def tensor_parallel() -> weft.Strategy:
    """Outputs of `COLUMNS` split, with the wide matrix beside them; inputs of `ROWS`, with the narrow one."""
    split = {}
    for name in COLUMNS:
        split[f"blocks.*.{name}.inner.*"] = split[f"blocks.*.{name}.wide"] = weft.split(0)
    for name in ROWS:
        split[f"blocks.*.{name}.inner.weight"] = split[f"blocks.*.{name}.narrow"] = weft.split(1)
    return weft.Strategy(batch={"*": weft.broadcast}, parameters=split)


STRATEGIES = {"data": weft.data_parallel(), "tensor": tensor_parallel()}


def exchanged_case(text: Tensor) -> Tensor:
    """ASCII text with "a" for "A" and "A" for "a"."""
    return torch.frombuffer(bytearray(text.numpy().tobytes().swapcase()), dtype=torch.uint8)


def adapt(model: GPT) -> list[nn.Parameter]:
    """Freeze a model, put an `Adapted` in the place of its linear layers, and return what is to be trained."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in (*COLUMNS, *ROWS):
            setattr(block, name, Adapted(getattr(block, name)))
    return [each for each in model.parameters() if each.requires_grad]


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 80, words)
    torch.manual_seed(0)
    model = GPT(layers=3, width=128, heads=4, length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    plain, batches = Plain(model, (loss_fn, optimizer)), text_batches(run.steps)
    with run.world():
        place = weft.placement("cpu", range(run.ranks))
        program = weft.compile(model, loss_fn, optimizer, batches[0], placement=place)
        run.train(batches, plain, program)
        program.close()
        weft.release(model, optimizer)

        optimizer = torch.optim.AdamW(adapt(model), lr=5e-3)
        plain = Plain(model, (loss_fn, optimizer))
        batches = text_batches(run.steps, text=exchanged_case(library_text()))
        program = weft.compile(
            model, loss_fn, optimizer, batches[0], placement=run.placement, strategy=run.strategy
        )
        run.train(batches, plain, program)
        run.finish(program)


if __name__ == "__main__":
    main()
