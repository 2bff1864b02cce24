"""A vision transformer on handwritten digits.

    weft run -n 2 examples/vit.py --strategy tensor

Tensor parallel: the layers' large matrices are split over the ranks by columns and rows, as Megatron-LM does; what lies
between them is split along the patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from example_data import learn_classes
from gallery import Run
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import weft

STRATEGIES = {
    "data": weft.data_parallel(),
    "tensor": weft.tensor_parallel(
        ["layers.*.qkv", "layers.*.up"], ["layers.*.proj", "layers.*.down"], sequence=1
    ),
}


class Layer(nn.Module):
    """Attention among all patches and a feed-forward net: [n, patches, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(seen)
        return x + self.down(gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Images [n, 1, 8, 8] to logits [n, 10] by 16 patches and a token for the class (Dosovitskiy et al. 2020)."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width) / 50)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.layers(x)[:, 0]))


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 200, words)
    torch.manual_seed(0)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    learn_classes(run, model, optimizer)


if __name__ == "__main__":
    main()
