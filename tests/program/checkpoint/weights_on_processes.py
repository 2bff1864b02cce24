"""A model on the meta device, of which files hold a part under another name, on ranks that are processes.

Usage: weights_on_processes.py FOLDER [other]: with "other" the ranks give other names.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import UserError

X = torch.ones(4, 4)


class Net(nn.Module):
    """Parts of one element and a stride of 0 on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.base(x))


def started(folder: str, names: dict[str, str]) -> weft.Program:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return weft.compile(
        *(model, lambda net, x: net(x).square().mean(), optimizer, X),
        placement=weft.placement("cpu", [0, 1]),
        strategy=weft.Strategy(zero=weft.Zero(3)),
        weights=weft.Weights(folder, names, strict=False),
    )


def main(folder: str, mode: str = "") -> None:
    names = {"^body": "base"}
    if mode:
        words = r"what weights= holds is \['base\.bias', 'base\.weight'\] on rank 0"
        with pytest.raises(UserError, match=words):
            started(folder, names if os.environ["RANK"] == "0" else {})
        return
    program = started(folder, names)
    state = program.full_state_dict()
    assert state["base.weight"].tolist() == [[1.0] * 4] * 3
    assert state["base.bias"].tolist() == [2.0] * 3
    assert state["head.weight"].std() > 0
    program.step(X)
    program.close()


main(*sys.argv[1:])
