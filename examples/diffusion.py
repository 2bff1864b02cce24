"""A diffusion model: a U-Net learns to find the noise in handwritten digits.

    weft run -n 2 examples/diffusion.py --strategy pipeline

Pipeline: the net is cut into two stages of equal cost; what the upper half reads of the lower one by its skip
connections is sent straight to where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from example_data import Batch, digit_batches
from gallery import Plain, Run
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss, scaled_dot_product_attention, silu

import weft

LEVELS = 100  # of noise
STRATEGIES = {
    "data": weft.data_parallel(),
    "pipeline": weft.Strategy(stages=2, micro_batches=4, schedule="1f1b"),
}


class NoisyBlock(nn.Module):
    """Two convolutions, the level of noise [n, width] added between them: [n, inputs, h, w] to [n, outputs, h, w]."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.level = nn.Linear(width, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        out = self.conv1(silu(self.norm1(x))) + self.level(level)[:, :, None, None]
        return self.shortcut(x) + self.conv2(silu(self.norm2(out)))


class Attended(nn.Module):
    """Every place sees every other: [n, channels, h, w] to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).flatten(2).transpose(1, 2)[:, None].chunk(3, dim=-1)
        seen = scaled_dot_product_attention(*parts)[:, 0].transpose(1, 2)
        return x + self.proj(seen.reshape(x.shape))


class DigitUNet(nn.Module):
    """Noisy images [n, 1, 8, 8] and their levels int64 [n] to the noise in them (Ho et al. 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.levels = nn.Embedding(LEVELS, width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down1 = NoisyBlock(width, width, width)
        self.smaller = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2 = NoisyBlock(width, 2 * width, width)
        self.middle, self.attended = NoisyBlock(2 * width, 2 * width, width), Attended(2 * width)
        self.up2 = NoisyBlock(4 * width, width, width)
        self.up1 = NoisyBlock(2 * width, width, width)
        self.norm, self.last = nn.GroupNorm(4, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        known = silu(self.levels(level))
        large = self.down1(self.first(noisy), known)
        small = self.down2(self.smaller(large), known)
        x = self.attended(self.middle(small, known))
        x = interpolate(self.up2(torch.cat([x, small], dim=1), known), scale_factor=2.0)
        x = self.up1(torch.cat([x, large], dim=1), known)
        return self.last(silu(self.norm(x)))


def noisy_batches(steps: int) -> list[Batch]:
    """Digits in [-1, 1], each under a level of noise of its own, with the noise."""
    kept = torch.cos(torch.linspace(0.05, 1.5, LEVELS)) ** 2
    found = []
    for batch in digit_batches(steps):
        clean, level = 2 * batch["x"] - 1, torch.randint(LEVELS, (len(batch["x"]),))
        part, noise = kept[level, None, None, None], torch.randn(clean.shape)
        noisy = part.sqrt() * clean + (1 - part).sqrt() * noise
        found.append({"noisy": noisy, "level": level, "noise": noise})
    return found


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch["noisy"], batch["level"]), batch["noise"])


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 150, words)
    torch.manual_seed(0)
    model = DigitUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    plain = Plain(model, (loss_fn, optimizer))
    batches = noisy_batches(run.steps)
    with run.world():
        program = weft.compile(
            model, loss_fn, optimizer, batches[0], placement=run.placement, strategy=run.strategy
        )
        run.train(batches, plain, program)
        run.finish(program)


if __name__ == "__main__":
    main()
