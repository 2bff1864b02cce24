"""Packed sequences of lengths in the batch, through recurrent layers, beside plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import weft
from single_device import assert_same_state
from weft.errors import CaptureError, RankFailure

S, B = weft.split, weft.broadcast
STRATEGIES: dict[str, Any] = {
    "data": weft.data_parallel(),
    "columns": weft.Strategy(batch={"*": B}, parameters={"layers.weight_ih_l0": S(0)}),
    "zero": weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3)),
    "stages": weft.Strategy(stages=2, micro_batches=2),
}
STEPS = 4


class Packing(nn.Module):
    """Embeds, packs, and reads what `read(model, packed, last)` says."""

    def __init__(self, kind: Any, read: Any, ordered: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(9, 3), kind(3, 3, batch_first=True, **options)
        self.head = nn.Linear(6 if options.get("bidirectional") else 3, 2)
        self.read, self.ordered = read, ordered

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(
            self.embed(x), lengths, batch_first=True, enforce_sorted=self.ordered
        )
        return self.read(self, *self.layers(packed))


def every(model: Packing, packed: PackedSequence, last: Any) -> Any:
    made, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=0.5)
    return model.head(made) * lengths.view(-1, 1, 1)


def every_of(model: Packing, packed: PackedSequence, last: Any) -> Any:
    total = STEPS + 1
    return model.head(pad_packed_sequence(packed, batch_first=True, total_length=total)[0])


def last_states(model: Packing, packed: PackedSequence, last: Any) -> Any:
    return torch.cat([model.head(each) for each in (last if isinstance(last, tuple) else (last,))])


def batch_of(*lengths: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    x = torch.randint(9, (len(lengths), STEPS), generator=generator)
    return {"x": x, "lengths": torch.tensor(lengths)}


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"], batch["lengths"]).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


UNSORTED = [batch_of(1, 4, 2, 3), batch_of(4, 1, 1, 2)]
SHORT = [batch_of(2, 1, 3, 3), batch_of(1, 1, 2, 1)]
TWO = {"num_layers": 2, "bidirectional": True}


@pytest.mark.parametrize(
    ("strategy", "model", "batches"),
    [
        ("data", Packing(nn.LSTM, every, **TWO), UNSORTED),
        pytest.param("columns", Packing(nn.LSTM, last_states), SHORT, marks=pytest.mark.thorough),
        ("zero", Packing(nn.LSTM, last_states, bias=False), SHORT),
        ("stages", Packing(nn.LSTM, every), UNSORTED),
        pytest.param(
            *("data", Packing(nn.GRU, every_of, bidirectional=True), SHORT),
            marks=pytest.mark.thorough,
        ),
        ("stages", Packing(nn.GRU, last_states, ordered=True), [batch_of(4, 3, 3, 1)]),
        ("data", Packing(nn.RNN, every_of, nonlinearity="relu"), SHORT),
    ],
)
def test_they_train_as_on_one_device(strategy: str, model: Packing, batches: list[Any]) -> None:
    model = copy.deepcopy(model).double()
    plain = copy.deepcopy(model)
    other = sgd(plain)
    with weft.local_world(2):
        program = weft.compile(
            model,
            loss_fn,
            sgd(model),
            batches[0],
            placement=weft.placement("cpu", [0, 1]),
            strategy=STRATEGIES[strategy],
        )
        for batch in batches:
            other.zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            other.step()
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-12)
        assert_same_state(program.full_state_dict(), plain.state_dict(), 1e-12)
        program.close()


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (Packing(nn.RNN, every), SHORT[0], "pass total_length=4"),
        (Packing(nn.RNN, every_of, ordered=True), UNSORTED[0], "lengths must not grow"),
        (Packing(nn.RNN, every_of), batch_of(1, 5, 2, 3), "lengths must be from 1 to 4"),
    ],
)
def test_lengths_are_checked_in_every_step(model: Packing, batch: Any, words: str) -> None:
    model = copy.deepcopy(model).double()
    with weft.local_world(1):
        place = weft.placement("cpu", [0])
        program = weft.compile(model, loss_fn, sgd(model), batch, placement=place)
        with pytest.raises(RankFailure, match=words):
            program.step(batch)
        program.close()


def of_data(model: Packing, packed: PackedSequence, last: Any) -> Any:
    return model.head(packed.data)


def of_parts(model: Packing, packed: PackedSequence, last: Any) -> Any:
    return packed.data[:, :2]


def of_relu(model: Packing, packed: PackedSequence, last: Any) -> Any:
    return packed._replace(data=torch.relu(packed.data))


def of_sizes(model: Packing, packed: PackedSequence, last: Any) -> Any:
    return packed.batch_sizes.tolist()


@pytest.mark.parametrize("read", [of_data, of_parts, of_relu, of_sizes])
def test_elements_of_a_packed_sequence_are_refused(read: Any) -> None:
    model, place = Packing(nn.RNN, read).double(), weft.placement("cpu", [0])
    with weft.local_world(1), pytest.raises(CaptureError, match="pad_packed_sequence: call that"):
        weft.compile(model, loss_fn, sgd(model), UNSORTED[0], placement=place)


def test_projections_are_refused() -> None:
    model, place = Packing(nn.LSTM, every, proj_size=2).double(), weft.placement("cpu", [0])
    with weft.local_world(1), pytest.raises(CaptureError, match="proj_size="):
        weft.compile(model, loss_fn, sgd(model), UNSORTED[0], placement=place)
