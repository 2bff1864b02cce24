"""The formulas on a case small enough to work out by hand, and the facts of a model whose size is published."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tools.real_sizes import textbook
from tools.real_sizes.facts import Facts, Weight, facts
from tools.real_sizes.family import Batch, Family, Shape
from tools.real_sizes.rows import FAMILIES
from tools.real_sizes.textbook import FEW


def weight(name: str, elements: int, **more: bool) -> Weight:
    told = {"product": False, "split": False, "expert": False, "lookup": False, "tied": False}
    return Weight(name, elements, 4 * elements, **{**told, "trained": True, **more})


# 2 layers, each a region; 8 sequences of 10 positions of 4 numbers: an activation has 1280 bytes.
TINY = Facts(
    (
        weight("matrix", 64, product=True, split=True),
        weight("experts", 32, product=True, expert=True),
        weight("table", 16, lookup=True, tied=True),
        weight("bias", 8),
    ),
    layers=2,
    regions=1,
    ends=2,
    tokens=10,
    sequences=8,
    hidden=4,
    item=4,
    cast=4,
    work=8000,
    blocks=1000,
    chosen=2,
    sparse=1,
)
ALL = 480  # bytes of parameters


def test_data_parallel() -> None:
    found = textbook.data(TINY, (4,))
    assert found.sent == {"all_reduce": 2 * 3 / 4 * ALL}
    assert (found.work, found.parameters, found.states) == (2000, ALL, 2 * ALL)
    assert found.exchanges == 4 + FEW


def test_zero() -> None:
    first, third = textbook.zero_1(TINY, (4,)), textbook.zero_3(TINY, (4,))
    assert first.sent == {"reduce_scatter": 360, "all_gather": 360}
    assert third.sent == {"reduce_scatter": 360, "all_gather": 720}
    assert (first.parameters, first.states, first.gathered) == (120, 240, ALL)
    assert (third.parameters, third.states) == (120, 240)


def test_matrices_under_autocast_travel_in_two_bytes() -> None:
    half = Facts(**{**vars(TINY), "cast": 2})
    # 64 elements of a matrix, 32 of experts, 24 others; what lies on a rank stays as it was.
    assert textbook.zero_1(half, (4,)).sent["all_gather"] == 3 / 4 * (64 * 2 + 56 * 4)
    assert textbook.data(half, (4,)).bytes == 2 * 3 / 4 * (64 * 2 + 56 * 4)
    assert textbook.data(half, (4,)).states == 2 * ALL


def test_tensor_parallel() -> None:
    found = textbook.tensor(TINY, (2,))
    # Two all-reduces forward, two backward, two for table and head; each sends half of 1280 twice.
    assert found.sent == {"all_reduce": 6 * 1280}
    assert found.parameters == 256 / 2 + 128 + 64 + 32
    assert found.work == 4000


def test_tensor_parallel_experts() -> None:
    """On 4 ranks, a token's two experts need half of what all tokens need, if no expert is shared."""
    region = 2 * 3 / 4 * 1280
    found = textbook.tensor(TINY, (4,))
    assert found.sent == {"all_reduce": (2 * (1 + 0.5) + 2) * region}
    shared = textbook.tensor(Facts(**{**vars(TINY), "shared": 1}), (4,))
    assert shared.sent == {"all_reduce": 6 * region}
    assert found.exchanges == shared.exchanges == 6 + textbook.OF_MIXTURE + FEW


def test_hybrid() -> None:
    found = textbook.tensor(TINY, (4, 2))
    assert found.sent == {"all_reduce": 6 * 1280 / 4 + 2 * 3 / 4 * (ALL - 128)}
    assert found.work == 1000


def test_sequence_parallel_sends_as_much_and_reduces_what_is_whole() -> None:
    whole, pieces = textbook.tensor(TINY, (2,)), textbook.sequence(TINY, (2,))
    assert pieces.sent == {"all_reduce": ALL - 256, "all_gather": 3840, "reduce_scatter": 3840}
    assert pieces.bytes == whole.bytes + ALL - 256


def test_experts() -> None:
    found = textbook.experts(TINY, (4,))
    # Two copies of a rank's 20 positions go there and back, forward and backward.
    assert found.sent["all_to_all"] == 4 * 3 / 4 * 2 * 1280 / 4
    assert found.sent["all_reduce"] == 2 * 3 / 4 * (ALL - 128)
    assert found.parameters == ALL - 128 + 32


def test_tables() -> None:
    found = textbook.tables(TINY, (4,))
    assert found.sent == {
        "all_reduce": 2 * 3 / 4 * (ALL - 64),
        "reduce_scatter": 960,
        "all_gather": 960,
    }


def test_pipeline() -> None:
    found = textbook.pipeline(8)(TINY, (4, 2))
    # Three cuts, there and back, half a batch on each rank; the tied table there, its gradient back.
    assert found.sent == {"all_reduce": ALL, "transfer": 6 * 1280 / 2 + 2 * 64}
    assert found.work == 4000
    zero = textbook.pipeline(8, zero=True)(TINY, (4, 2))
    assert zero.sent["all_gather"] == zero.sent["reduce_scatter"] == ALL / 2


def test_recompute() -> None:
    found = textbook.recomputed(TINY, (4,))
    assert (found.bytes, found.work) == (textbook.data(TINY, (4,)).bytes, 2250)


def test_facts_of_a_published_model() -> None:
    """GPT-2 XL: 1,557,611,200 parameters, of which 1.5 billion give it its name."""
    family, shape = FAMILIES["GPT-2 XL"], Shape(48, 1024, 8)
    model = family.model(shape)
    known = facts(family, shape, model, dict(model.named_parameters()))
    layer = 2 * 3200 + 1600 * 4800 + 4800 + 1600 * 1600 + 1600 + 2 * 1600 * 6400 + 6400 + 1600
    assert sum(weight.elements for weight in known.weights) == 1_557_611_200
    assert 50257 * 1600 + 1024 * 1600 + 48 * layer + 3200 == 1_557_611_200
    assert textbook.data(known, (8,)).bytes == 2 * 7 / 8 * 4 * 1_557_611_200
    # Head and layers 6 times for each position, attention 7 products of 1024 × 1024 × 1600 a layer.
    matrices = 50257 * 1600 + 48 * (1600 * 4800 + 1600 * 1600 + 2 * 1600 * 6400)
    assert known.work == 8 * (6 * 1024 * matrices + 48 * 7 * 2 * 1024 * 1024 * 1600)


class Stack(nn.Module):
    """Layers and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def _ids(sequences: int, tokens: int) -> Batch:
    return {"ids": torch.empty(sequences, tokens, dtype=torch.long, device="meta")}


def _stack(layers: int, tokens: int) -> nn.Module:
    with torch.device("meta"):
        return Stack()


def test_work_is_what_torch_counts() -> None:
    family = Family(
        "stack",
        "",
        _stack,
        _ids,
        3,
        16,
        lambda layers, tokens: 0,
        {"table*": 0},
        blocks=("layers.*",),
    )
    shape = Shape(3, 10, 4)
    model = family.model(shape)
    known = facts(family, shape, model, dict(model.named_parameters()))
    with FlopCounterMode(display=False) as forward:
        found = model(**_ids(4, 10))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(found.sum())
    assert known.blocks == forward.get_total_flops()
    assert known.work == forward.get_total_flops() + backward.get_total_flops()
