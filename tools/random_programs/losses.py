"""Losses of random programs: what a batch holds beside `x`, and the lines that make a loss of `y`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Loss:
    """A loss as text.

    Attributes:
        leaves: expressions of the batch's further entries, by key; they draw from `g` for n samples.
        lines: of the loss function, from `out` and `batch` to `loss`.
    """

    leaves: Mapping[str, str]
    lines: str


Writer = Callable[[random.Random, tuple[int, ...]], Loss]
_losses: dict[str, Writer] = {}
LOSSES: Mapping[str, Writer] = _losses


def _loss(write: Writer) -> Writer:
    _losses[write.__name__.lstrip("_")] = write
    return write


def _like(shape: tuple[int, ...]) -> str:
    return f"torch.randn(n, {', '.join(map(str, shape))}, generator=g)"


@_loss
def _squares(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    return Loss({}, "loss = out.square().mean()")


@_loss
def _plain(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    return Loss(
        {},
        "loss = "
        + rng.choice(
            [
                "out.tanh().sum() / out.shape[0]",
                "out.square().sum(-1).add(0.1).sqrt().mean()",
                "out.logsumexp(-1).mean()",
                "out.flatten(1).logsumexp(1).sum()",
                "F.softplus(out).mean() + out.square().amax()",
                "(out - out.mean(0)).square().mean()",
                "torch.linalg.vector_norm(out)",
                "out.sigmoid().log().mean().neg().exp()",
                "out.abs().sum().sqrt()",
            ]
        ),
    )


@_loss
def _regression(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    reduction = rng.choice(["mean", "mean", "sum", "none"])
    name = rng.choice(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
    tail = ".sum() / out.shape[0]" if reduction == "none" else ""
    return Loss(
        {"y": _like(shape)}, f"loss = F.{name}(out, batch['y'], reduction={reduction!r}){tail}"
    )


@_loss
def _binary(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    more = rng.choice(["", ", pos_weight=torch.tensor(2.0, dtype=out.dtype)", ", reduction='sum'"])
    lines = f"loss = F.binary_cross_entropy_with_logits(out, batch['y']{more})"
    return Loss({"y": f"{_like(shape)}.sigmoid()"}, lines)


@_loss
def _masked(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    """Only some elements count; the number of them is that of the whole batch."""
    mask = f"torch.rand(n, {shape[0]}, generator=g) < 0.6"
    more = ", None" * (len(shape) - 1)
    lines = f"""mask = batch["mask"][:, :{more}].to(out.dtype)
    loss = (mask * (out - batch["y"]).square()).sum() / (mask.sum() + 1)"""
    return Loss({"y": _like(shape), "mask": mask}, lines)


@_loss
def _classes(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    """Of the last dimension, or of the channels of images."""
    images = len(shape) == 3
    classes, places = (shape[0], shape[1:]) if images else (shape[-1], shape[:-1])
    ignored = rng.random() < 0.4
    labels = f"torch.randint({'-1' if ignored else '0'}, {classes}, {('n', *places)}, generator=g)".replace(
        "'", ""
    )
    more = ", ignore_index=-1" if ignored else ""
    more += rng.choice(["", "", ", label_smoothing=0.1"])
    more += rng.choice(
        [
            "",
            "",
            ", reduction='sum'",
            f", weight=torch.linspace(0.5, 1.5, {classes}, dtype=out.dtype)",
        ]
    )
    given = "out, y" if images or len(shape) == 1 else "out.flatten(0, 1), y.flatten()"
    if len(shape) == 2 and rng.random() < 0.3:
        given = "out.transpose(1, 2), y"
    # Without a counted label the mean is no number.
    first = "y = batch['y']"
    if ignored:
        first = "y = torch.cat([batch['y'][:1].clamp(min=0), batch['y'][1:]])"
    return Loss({"y": labels}, f"{first}\n    loss = F.cross_entropy({given}{more})")


@_loss
def _next_token(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    """Labels one position ahead."""
    if len(shape) != 2 or shape[0] < 2:
        return _classes(rng, shape)
    labels = f"torch.randint({shape[1]}, (n, {shape[0]}), generator=g)"
    form = rng.choice(["reshape(-1, out.shape[-1])", "flatten(0, 1)"])
    lines = f"loss = F.cross_entropy(out[:, :-1].{form}, batch['y'][:, 1:].reshape(-1))"
    return Loss({"y": labels}, lines)


@_loss
def _contrastive(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    lines = """one = F.normalize(out.flatten(1), dim=-1)
    two = F.normalize(batch["y"].flatten(1), dim=-1)
    scores = one @ two.t() * 3
    pairs = torch.arange(scores.shape[0])
    loss = (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2"""
    return Loss({"y": _like(shape)}, lines)


@_loss
def _divergence(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    reduction = rng.choice(["batchmean", "sum", "mean"])
    lines = f"loss = F.kl_div(out.log_softmax(-1), batch['y'].softmax(-1), reduction={reduction!r})"
    return Loss({"y": _like(shape)}, lines)


@_loss
def _weighted(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    """A weight for each sample."""
    leaves = {"y": _like(shape), "weight": "torch.rand(n, generator=g)"}
    lines = """each = (out - batch["y"]).square().flatten(1).mean(1)
    loss = (each * batch["weight"]).sum() / batch["weight"].sum()"""
    return Loss(leaves, lines)


@_loss
def _several(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    size = prod(shape)
    lines = f"""first = F.smooth_l1_loss(out, batch["y"])
    second = F.triplet_margin_loss(out.flatten(1), batch["y"].flatten(1), -batch["y"].flatten(1))
    third = F.cosine_embedding_loss(out.flatten(1), batch["y"].flatten(1), torch.ones(out.shape[0]))
    loss = first + 0.1 * second + {0.1 if size > 1 else 0.0} * third"""
    return Loss({"y": _like(shape)}, lines)


@_loss
def _ranks(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    """Margins, and distances of all pairs."""
    line = rng.choice(
        [
            "F.margin_ranking_loss(out, batch['y'], batch['y'].sign(), margin=0.5)",
            "F.hinge_embedding_loss(out, batch['y'].sign())",
            "F.soft_margin_loss(out, batch['y'].sign())",
            "F.poisson_nll_loss(out, batch['y'].exp(), reduction='mean')",
            "F.multilabel_soft_margin_loss(out.flatten(1), (batch['y'].flatten(1) > 0).to(out.dtype))",
            "torch.pdist(out.flatten(1)).mean() if out.shape[0] > 1 else out.sum()",
            "torch.cdist(out.flatten(1), batch['y'].flatten(1)).mean()",
            "(out - batch['y']).abs().flatten(1).topk(1, -1).values.mean()",
            "F.mse_loss(out.sort(0).values, batch['y'].sort(0).values)",
        ]
    )
    return Loss({"y": _like(shape)}, f"loss = {line}")


@_loss
def _soft_classes(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    """Probabilities as targets; of the last dimension."""
    more = rng.choice(["", ", label_smoothing=0.2", ", reduction='sum'"])
    given = "out.reshape(-1, out.shape[-1]), batch['y'].reshape(-1, out.shape[-1]).softmax(-1)"
    return Loss({"y": _like(shape)}, f"loss = F.cross_entropy({given}{more})")


@_loss
def _nested(rng: random.Random, shape: tuple[int, ...]) -> Loss:
    """A batch with lists and dicts in it, and one number for each sample."""
    leaves = {"more": f"[{_like(shape)}, {{'kind': torch.randint(3, (n,), generator=g)}}]"}
    lines = """target, kind = batch["more"][0], batch["more"][1]["kind"]
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=out.dtype)[kind]
    loss = (scale * (out - target).square().flatten(1).mean(1)).mean()"""
    return Loss(leaves, lines)
