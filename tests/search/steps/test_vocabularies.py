"""Parameters with a row for each word or class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import weft
from search.jobs import decoder, dense, loss, step_of
from weft.planning.machine import machine_of
from weft.planning.stored_step import StoredStep
from weft.search.steps.facts import StepFacts
from weft.search.steps.linears import vocabularies


class Tables(nn.Module):
    """Two tables whose rows are read; of another matrix some positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(12, 8), nn.EmbeddingBag(20, 8, mode="sum")
        self.places, self.out = nn.Parameter(torch.zeros(4, 8)), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.words(x[:, 0]) + self.bags(x) + self.places[0]
        made: Tensor = self.out(torch.relu(mixed))
        return made


def tables() -> StoredStep:
    batch = {"x": torch.zeros(8, 2, dtype=torch.int64), "y": torch.zeros(8, dtype=torch.int64)}
    model = Tables()
    return weft.Job(model, loss, torch.optim.AdamW(model.parameters()), batch).stored()


def test_tables_and_the_layer_behind_a_loss_have_rows_of_words_and_classes() -> None:
    found = vocabularies(tables().graph)
    assert sorted(found) == ["bags.weight", "out.bias", "out.weight", "words.weight"]


def test_layers_before_the_last_have_none() -> None:
    assert sorted(vocabularies(step_of(dense(16, 32, 4), 8, 16).graph)) == ["2.bias", "2.weight"]


def test_a_decoder_looks_words_up_and_tells_them() -> None:
    """Its loss reads the results of the head in another shape."""
    found = vocabularies(decoder().graph)
    assert {each.split(".")[0] for each in found} >= {"head"}
    assert any("token" in each or "embed" in each for each in found)


def test_what_the_user_lays_out_is_not_among_them() -> None:
    fixed = weft.Strategy(parameters={"words.*": weft.broadcast})
    found = StepFacts(tables(), machine_of("h100x2"), fixed).vocabularies
    assert "words.weight" not in found
    assert "bags.weight" in found
