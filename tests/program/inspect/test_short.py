"""A program shows itself in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import weft
from models import MLP, classification_loss, vector_batch


@pytest.fixture
def program() -> Iterator[weft.Program]:
    model: nn.Module = type("Net<2>", (MLP,), {})()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = vector_batch(dtype=torch.float32)
    with weft.local_world(2):
        place = weft.placement("cpu", [0, 1])
        made = weft.compile(model, classification_loss, optimizer, batch, placement=place)
        yield made
        made.close()


def rows(program: weft.Program) -> tuple[str | None, dict[str, str]]:
    """Caption and rows of the table, which is well-formed."""
    table = ElementTree.fromstring(program._repr_html_())
    assert table.tag == "table"
    every = table.findall("tbody/tr")
    cells = [[each.text or "" for each in row] for row in every]
    return table.findtext("caption"), dict(cells)


def test_a_notebook_shows_a_program_by_itself(program: weft.Program) -> None:
    caption, found = rows(program)
    assert caption == "Net<2>, training step by SGD on cpu [0, 1]"
    assert found["strategy"] == "data parallel over axis 0 (2 ranks)"
    assert found["batch"] == "x float32[8, 8], y int64[8]"
    assert found["steps"] == "0 steps made"
    sent, memory = list(found)[3:]
    assert f"{sent}: {found[sent]}" in program.explain()
    assert memory.startswith("memory of rank")
    assert "measured" not in found[memory]


def test_it_tells_what_has_happened_and_simulates_nothing(program: weft.Program) -> None:
    program.step(vector_batch(dtype=torch.float32))
    _, found = rows(program)
    assert found["steps"] == "1 step made"
    assert "measured" in next(reversed(found.values()))
    assert not program._simulated
    program.close()
    assert rows(program)[1]["steps"] == "closed"


def test_one_is_told_from_several(program: weft.Program) -> None:
    batch = vector_batch(dtype=torch.float32)
    held_out = program.evaluation(lambda model, batch: model(batch["x"]).sum(), batch)
    assert rows(held_out)[1]["sent by a rank in a step, on average"].endswith(" in 1 exchange")


def test_zero_beside_an_open_program_says_why_it_shards_nothing() -> None:
    model: nn.Module = MLP()
    batch, place = vector_batch(dtype=torch.float32), weft.placement("cpu", [0, 1])
    sharded = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))
    with weft.local_world(2):
        first, second = (
            weft.compile(
                *(model, classification_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch),
                placement=place,
                strategy=strategy,
            )
            for strategy in (None, sharded)
        )
        assert (
            "note: zero: parameters stay whole, in the layouts that open programs"
            in second.explain()
        )
        second.close()
        first.close()
