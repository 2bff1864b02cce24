"""A GAN on handwritten digits: two programs share one model, and each trains a part of it.

    weft run -n 2 examples/gan.py --strategy apart

Apart: generator and discriminator are stages on ranks of their own; images and their gradients travel between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from example_data import Batch, digit_batches
from gallery import Plain, Run
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

import weft

NOISE = 16
STRATEGIES = {
    "data": weft.data_parallel(),
    "apart": weft.Strategy(
        stages=[
            weft.Stage(["generator"], placement=weft.placement("cpu", [0])),
            weft.Stage(["discriminator"], placement=weft.placement("cpu", [1])),
        ],
        micro_batches=2,
    ),
}


def generator(width: int = 32) -> nn.Module:
    """Noise [n, NOISE] to images [n, 1, 8, 8] in [0, 1]."""
    return nn.Sequential(
        nn.Linear(NOISE, 4 * width * 4),
        nn.Unflatten(1, (4 * width, 2, 2)),
        nn.GroupNorm(4, 4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, width, 4, stride=2, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


def discriminator(width: int = 32) -> nn.Module:
    """Images [n, 1, 8, 8] to logits [n, 1]: positive for real ones."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(8 * width, 1),
    )


def telling_loss(gan: nn.ModuleDict, batch: Batch) -> Tensor:
    """The discriminator's: real images and made ones are told apart."""
    real = gan["discriminator"](batch["real"])
    made = gan["discriminator"](gan["generator"](batch["noise"]).detach())
    return softplus(-real).mean() + softplus(made).mean()


def making_loss(gan: nn.ModuleDict, batch: Batch) -> Tensor:
    """The generator's: its images are taken for real ones."""
    made = gan["discriminator"](gan["generator"](batch["noise"]))
    return binary_cross_entropy_with_logits(made, torch.ones_like(made))


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 200, words)
    torch.manual_seed(0)
    gan = nn.ModuleDict({"discriminator": discriminator(), "generator": generator()})
    losses = telling_loss, making_loss
    optimizers = [
        torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in gan.values()
    ]
    plain = Plain(gan, *zip(losses, optimizers))
    noise = torch.randn(run.steps, 64, NOISE)
    drawn = digit_batches(run.steps)
    batches = [{"real": each["x"], "noise": z} for each, z in zip(drawn, noise)]
    with run.world():
        programs = [
            weft.compile(
                gan, loss_fn, optimizer, batches[0], placement=run.placement, strategy=run.strategy
            )
            for loss_fn, optimizer in zip(losses, optimizers)
        ]
        run.train(batches, plain, *programs)
        run.finish(*programs)


if __name__ == "__main__":
    main()
