"""The title of a program: where it runs, in few words."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.program.inspect.summary import title


@pytest.mark.parametrize(
    ("grid", "entries", "where"),
    [
        ([0], {}, "cpu [0]"),
        ([[0, 1], [2, 3]], {}, "cpu [[0, 1], [2, 3]]"),
        ([0, 1], {"stages": 2, "micro_batches": 2}, "cpu [0, 1] in 2 stages"),
        (
            [[0, 1], [2, 3]],
            {"stages": 2, "micro_batches": 2},
            "cpu [0, 1, 2, 3] in 2 stages",
        ),
    ],
)
def test_ranks_and_stages(grid: list[object], entries: dict[str, int], where: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    with weft.local_world(torch.tensor(grid).numel()):
        program = weft.compile(
            *(model, lambda net, x: net(x).sum(), optimizer, torch.ones(8, 4)),
            placement=weft.placement("cpu", grid),
            strategy=weft.Strategy(batch={"*": weft.split(0)}, **entries),
        )
        assert title(program.graph) == f"Sequential, training step by SGD on {where}"
        # The batch is the user's, however it is cut.
        assert "batch float32[8, 4]" in repr(program)
        program.close()
