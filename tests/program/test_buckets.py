"""Batches of many lengths, padded to a few."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import BatchError, UserError

BUCKETS = weft.Buckets((8, 16), {"x": 0, "y": -100})


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(x)))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def batch_of(length: int, seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    draw: Any = lambda top: torch.randint(top, (4, length), generator=drawn)  # noqa: E731
    return {"x": draw(11), "y": draw(5), "weight": torch.ones(4)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_padded_batches_train_as_plain_ones(ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    plain = copy.deepcopy(model)
    own, other = (
        torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, plain)
    )
    lengths = [5, 8, 11, 7, 16]
    caplog.set_level("INFO", "weft")
    with weft.local_world(ranks):
        program = weft.compile(
            model, loss_fn, own, batch_of(6, 0), placement=weft.placement("cpu", list(range(ranks))),
            shapes=BUCKETS,
        )  # fmt: skip
        for seed, length in enumerate(lengths):
            batch = batch_of(length, seed)
            other.zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            other.step()
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-10)
        state = program.full_state_dict()
        program.close()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-10)
    assert sum("planned the step again" in record.message for record in caplog.records) == 1


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(BatchError, match="length 17, the longest of weft.Buckets is 16"):
        BUCKETS.padded(batch_of(17, 0))
    with pytest.raises(BatchError, match="names the leaves x, y, the batch has z"):
        BUCKETS.padded({"z": torch.ones(2, 3)})
    with pytest.raises(BatchError, match="no dimension 1"):
        BUCKETS.padded({"x": torch.ones(2)})
    with pytest.raises(UserError, match="rising lengths"):
        weft.Buckets((16, 8), {"x": 0})
    with pytest.raises(UserError, match="what to pad"):
        weft.Buckets((8,), {})


def test_of_padded_batches_each_process_takes_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest row of all says how far they are padded."""
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with weft.local_world(1):
        given: dict[str, Any] = {"placement": weft.placement("cpu", [0])}
        program = weft.compile(model, loss_fn, optimizer, batch_of(6, 0), shapes=BUCKETS, **given)
        monkeypatch.setattr(type(program._core.variants), "rows", lambda *_: [0])
        assert program.rows(4) == [0, 1, 2, 3]
        program.close()
