"""Steps leave nothing behind: after many of them as many tensors are alive as after the first ones."""

from __future__ import annotations

import gc

import pytest
import torch

import weft
from examples.gpt_model import GPT, loss_fn

STRATEGIES = {
    "data parallel": weft.data_parallel(),
    "ZeRO 3": weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(level=3)),
    "pipeline": weft.Strategy(stages=2, micro_batches=4),
}


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


@pytest.mark.one_process("all tensors of the process are counted")
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_no_tensor_stays(strategy: weft.Strategy) -> None:
    torch.manual_seed(0)
    model = GPT(2, 16, 2, 8)
    tokens = torch.randint(256, (8, 9))
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        program = weft.compile(
            model, loss_fn, optimizer, batch, placement=placement, strategy=strategy
        )
        counts = []
        for _ in range(2):
            for _ in range(5):
                float(program.step(batch))
            counts.append(live_tensors())
        program.close()
    assert counts[1] <= counts[0]
