"""Stages, data and tensor parallel, ZeRO and micro-batches, planned for one rank of each class, train as one device."""

from __future__ import annotations

import copy

import pytest
import torch

import weft
from models import GPT, token_batch, token_loss

S, B = weft.split, weft.broadcast


@pytest.mark.parametrize("classes", [B, S(0)], ids=["head whole", "head split by classes"])
def test_eight_ranks_train_as_one_device(classes: weft.layout.SBP) -> None:
    torch.manual_seed(0)
    model = GPT().double()
    plain = copy.deepcopy(model)
    batches = [token_batch(8, seed=seed) for seed in range(3)]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = token_loss(plain, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    layers = {"blocks.*.up.weight": (B, S(0)), "blocks.*.down.weight": (B, S(1))}
    strategy = weft.Strategy(
        batch={"*": (S(0), B)},
        parameters={**layers, "head.weight": (B, classes)},
        stages=2,
        micro_batches=2,
        zero=weft.Zero(1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    placement = weft.placement("cpu", torch.arange(8).view(4, 2).tolist())
    with weft.local_world(8):
        program = weft.compile(
            model, token_loss, optimizer, batches[0], placement=placement, strategy=strategy
        )
        found = [program.step(batch).item() for batch in batches]
        whole = program.full_state_dict()
    assert found == pytest.approx(losses, rel=1e-10)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-12)
