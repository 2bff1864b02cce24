"""Strategies that name linear layers hold for layers without a bias too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from models import classification_loss, vector_batch
from weft.errors import StrategyError


def layouts(strategy: weft.Strategy) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = vector_batch(dtype=torch.float32)
    with weft.local_world(2):
        program = weft.compile(
            model,
            classification_loss,
            optimizer,
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=strategy,
        )
        program.close()
    values = {name: value for name, value in program.graph.values.items() if "weight" in name}
    return {name: str(values[name].layout.sbp[0]) for name in ("0.weight", "2.weight")}


def test_a_layer_without_bias_is_split_by_its_weight() -> None:
    assert layouts(weft.tensor_parallel(["0"], ["2"])) == {"0.weight": "S(0)", "2.weight": "S(1)"}


def test_a_bias_named_alone_must_exist() -> None:
    with pytest.raises(StrategyError, match=r"parameters=\{'0.bias': …\} matches nothing"):
        layouts(weft.Strategy(parameters={"0.bias": weft.split(0)}))


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"parameters=\{'up.weight': …\} matches nothing"):
        layouts(weft.tensor_parallel(["up"]))
