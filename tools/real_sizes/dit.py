"""DiT (Peebles and Xie, 2212.09748): a transformer that takes the noise out of latent images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.real_sizes.family import Batch

# Latents of an image of 256 × 256, in patches of 2 × 2.
CHANNELS, SIDE, PATCH = 4, 32, 2
POSITIONS = (SIDE // PATCH) ** 2


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """Attention and two layers, scaled and shifted by the condition (section 3.2): [n, t, d] -> [n, t, d]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(functional.silu(c)).chunk(
            6, dim=1
        )
        y = _modulated(self.norm1(x), shift1, scale1)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1[:, None] * self.out(y)
        y = _modulated(self.norm2(x), shift2, scale2)
        y = self.down(functional.gelu(self.up(y), approximate="tanh"))
        found: Tensor = x + gate2[:, None] * y
        return found


class DiT(nn.Module):
    """Latents [n, 4, 32, 32], times [n] and classes [n] -> noise [n, 4, 32, 32]; DiT-XL/2 by its default sizes."""

    def __init__(
        self, layers: int = 28, width: int = 1152, heads: int = 16, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, width, PATCH, PATCH)
        self.positions = nn.Parameter(torch.zeros(1, POSITIONS, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.condition = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, PATCH * PATCH * CHANNELS)

    def forward(self, latents: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        c = self.time(_waves(times)) + self.classes(classes)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.condition(functional.silu(c)).chunk(2, dim=1)
        side = SIDE // PATCH
        noise: Tensor = self.head(_modulated(self.norm(x), shift, scale))
        noise = noise.view(-1, side, side, PATCH, PATCH, CHANNELS).permute(0, 5, 1, 3, 2, 4)
        found: Tensor = noise.reshape(-1, CHANNELS, SIDE, SIDE)
        return found


def _waves(times: Tensor) -> Tensor:
    """Sines and cosines of a time: [n] -> [n, 256]."""
    steps = torch.arange(128, device=times.device, dtype=torch.float32)
    angles = times[:, None] * torch.exp(steps * (-math.log(10000) / 128))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def batch(n: int, tokens: int) -> Batch:
    """Latents, times and classes, and the noise to find."""
    with torch.device("meta"):
        latents = torch.empty(n, CHANNELS, SIDE, SIDE)
        classes = torch.empty(n, dtype=torch.long)
        return {"x": latents, "times": torch.empty(n), "classes": classes, "noise": latents.clone()}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean square error of the noise."""
    return functional.mse_loss(model(batch["x"], batch["times"], batch["classes"]), batch["noise"])
