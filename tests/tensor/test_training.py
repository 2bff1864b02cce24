"""Modules with global parameters train as plain ones do."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined, call-arg"

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft

S, B = weft.split, weft.broadcast


class Block(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 11, width: int = 8, time: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(time, width) * 0.1)
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embedding(tokens) + self.position)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


SETTINGS = {
    "data": ([0, 1], {}, S(0)),
    "tensor": (
        [0, 1, 2, 3],
        {
            "block.qkv.*": S(0),
            "block.up.*": S(0),
            "block.down.weight": S(1),
            "embedding.weight": S(0),
        },
        B,
    ),
    "hybrid": (
        [[0, 1], [2, 3]],
        {"block.up.*": (B, S(0)), "block.down.weight": (B, S(1)), "block.out.weight": (S(0), B)},
        (S(0), B),
    ),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def train(model, x, y, make_optimizer, steps=2):
    optimizer = make_optimizer(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("setting", "optimizer"),
    [("data", "adamw"), ("tensor", "fused"), *(("hybrid", name) for name in OPTIMIZERS)],
)
def test_a_gpt_trains_as_on_one_device(setting, optimizer):
    torch.manual_seed(0)
    plain = GPT().double()
    x, y = torch.randint(11, (6, 6)), torch.randint(11, (6, 6))
    grid, patterns, sbp = SETTINGS[setting]
    placement = weft.placement("cpu", grid)
    with weft.local_world(4):
        model = weft.distribute(copy.deepcopy(plain), placement, patterns)
        assert model.head.weight is model.embedding.weight
        batch = [weft.tensor(part, placement=placement, sbp=sbp) for part in (x, y)]
        found = train(model, *batch, OPTIMIZERS[optimizer])
        expected = train(plain, x, y, OPTIMIZERS[optimizer])
        torch.testing.assert_close(found, expected)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full(), theirs, msg=name, rtol=1e-6, atol=1e-7)
            assert ours.grad.sbp == ours.sbp, name
            torch.testing.assert_close(ours.grad.full(), theirs.grad, msg=name)


def test_batch_norm_takes_the_whole_batch():
    torch.manual_seed(0)
    plain = Convolutions().double()
    x, y = torch.randn(5, 3, 4, 4, dtype=torch.float64), torch.randint(5, (5,))
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        model = weft.distribute(copy.deepcopy(plain), placement, {"conv.weight": S(0)})
        batch = [weft.tensor(part, placement=placement, sbp=S(0)) for part in (x, y)]
        assert train(model, *batch, OPTIMIZERS["sgd"]) == pytest.approx(
            train(plain, x, y, OPTIMIZERS["sgd"])
        )
        torch.testing.assert_close(model.norm.running_var.full(), plain.norm.running_var)
        model.eval()
        plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(batch[0]).full(), plain(x))


def test_modules_convert_and_evaluate():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    placement = weft.placement("cpu", [0, 1])
    x = torch.randn(5, 4)
    with weft.local_world(2):
        model = weft.distribute(copy.deepcopy(plain), placement, {"0.*": S(0)})
        theirs = weft.tensor(x, placement=placement, sbp=S(0))
        with torch.inference_mode():
            torch.testing.assert_close(model(theirs).full(), plain(x))
        model(theirs).sum().backward()
        plain(x).sum().backward()
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert f"{found:.4f}" == f"{nn.utils.clip_grad_norm_(plain.parameters(), 0.1):.4f}"
        model.load_state_dict(copy.deepcopy(model).state_dict())
        model.double()
        assert model[0].weight.locals[0].dtype == torch.float64
        assert model(theirs.double()).dtype == torch.float64
        model[0].weight.data.zero_()
        assert model[0].weight.full().abs().sum() == 0
        model[0].weight.data = weft.ones(6, 4, placement=placement, sbp=B)
        assert model[0].weight.sbp == (B,)
        assert model[0].weight.full().sum() == 24
        with pytest.raises(weft.errors.LayoutError, match="replaced by a global tensor only"):
            model[0].weight.data = torch.ones(6, 4)


def test_distribute_names_what_is_wrong():
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        with pytest.raises(
            weft.errors.StrategyError, match="'wieght' matches nothing.*exist: weight"
        ):
            weft.distribute(nn.Linear(2, 2), placement, {"wieght": S(0)})
        with pytest.raises(
            weft.errors.LayoutError, match="distribute: bias: .* splits dimension 1"
        ):
            weft.distribute(nn.Linear(2, 2), placement, {"*": S(1)})
        done = weft.distribute(nn.Linear(2, 2), placement)
        with pytest.raises(weft.errors.LayoutError, match="weight is a global tensor already"):
            weft.distribute(done, placement)
