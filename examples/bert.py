"""BERT of `transformers`: trained to fill in masked bytes, then fine-tuned to tell packages apart by their source text.

    weft run -n 2 examples/bert.py --strategy pipeline

Nothing is downloaded. The first training is data parallel; the weights go into a classifier, whose embeddings and lower
layers stay frozen, and which is trained by the chosen strategy: with gradients and states in shards, or as a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from example_text import Batch, library_text, windows
from gallery import Plain, Run
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

import weft

PACKAGES = ("asyncio", "encodings", "pydoc_data", "unittest")
MASK, LENGTH = 256, 64
CONFIG = BertConfig(
    vocab_size=257,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    type_vocab_size=1,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    id2label=dict(enumerate(PACKAGES)),
)
STRATEGIES = {
    "zero": replace(weft.data_parallel(), zero=weft.Zero(2)),
    "pipeline": weft.Strategy(batch={"*": weft.split(0)}, stages=2, micro_batches=4),
}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The loss as the model computes it from the labels."""
    return model(**batch).loss


def right(model: nn.Module, batch: Batch) -> Tensor:
    return (model(input_ids=batch["input_ids"]).logits.argmax(1) == batch["labels"]).sum()


def masked(steps: int, size: int = 32) -> list[Batch]:
    """Windows of text of which every seventh byte or so is masked, and these bytes as labels."""
    text = windows(library_text(), steps * size, LENGTH)
    hidden = torch.rand(text.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    ids, labels = text.masked_fill(hidden, MASK).split(size), text.masked_fill(~hidden, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels.split(size))]


def labelled(steps: int, size: int = 32, seed: int = 2) -> list[Batch]:
    """Windows of the packages' text, as many of each, and their packages."""
    each = steps * size // len(PACKAGES)
    texts = [windows(library_text(f"{name}/*.py"), each, LENGTH, seed) for name in PACKAGES]
    ids = torch.stack(texts, dim=1).flatten(0, 1).split(size)
    return [{"input_ids": x, "labels": torch.arange(len(x)) % len(PACKAGES)} for x in ids]


def pretrained(run: Run) -> BertForMaskedLM:
    """A model that fills in masked bytes, ordinary again after its training."""
    model = BertForMaskedLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain, batches = Plain(model, (loss_fn, optimizer)), masked(run.steps)
    place = weft.placement("cpu", range(run.ranks))
    program = weft.compile(model, loss_fn, optimizer, batches[0], placement=place)
    run.train(batches, plain, program)
    program.close()
    weft.release(model, optimizer)
    return model


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 150, words)
    torch.manual_seed(0)
    with run.world():
        model = BertForSequenceClassification(CONFIG)
        model.bert.load_state_dict(pretrained(run).bert.state_dict(), strict=False)
        for frozen in (model.bert.embeddings, *model.bert.encoder.layer[:1]):
            frozen.requires_grad_(False)
        head = list(model.classifier.parameters())
        body = [each for each in model.bert.parameters() if each.requires_grad]
        groups = [{"params": body, "lr": 1e-3}, {"params": head, "lr": 2e-3}]
        optimizer = torch.optim.AdamW(groups)
        plain = Plain(model, (loss_fn, optimizer))
        batches, (test,) = labelled(run.steps), labelled(1, size=200, seed=3)
        program = weft.compile(
            model, loss_fn, optimizer, batches[0], placement=run.placement, strategy=run.strategy
        )
        run.train(batches, plain, program)
        found = int(program.evaluation(right, test).step(test))
        run.say(f"{found} of {len(test['labels'])} windows of the test right")
        run.finish(program)


if __name__ == "__main__":
    main()
