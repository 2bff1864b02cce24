"""Texts of many lengths as rows of one length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft.errors import UserError


def texts(lengths: list[int]) -> list[torch.Tensor]:
    """Text 3 is 300, 301, …"""
    return [100 * number + torch.arange(length) for number, length in enumerate(lengths)]


@pytest.mark.parametrize("length", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("lengths", [[5, 0, 2, 9, 4], [20], [1] * 20])
def test_all_tokens_in_order(lengths: list[int], length: int) -> None:
    packed = weft.Packed(texts(lengths), length)
    rows = [packed[number] for number in range(len(packed))]
    flat = torch.cat(texts(lengths))
    assert len(rows) == 20 // length
    assert all(row["tokens"].shape == (length,) for row in rows)
    assert torch.equal(torch.cat([row["tokens"] for row in rows]), flat[: len(rows) * length])
    for row in rows:
        assert torch.equal(row["tokens"], 100 * row["text"] + row["position"])


def test_an_empty_list_is_a_text() -> None:
    """torch takes it for floating point."""
    packed = weft.Packed([{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3]}], 3)
    assert packed[0]["tokens"].tolist() == [1, 2, 3]


def test_texts_are_read_for_their_rows_alone() -> None:
    asked: list[int] = []

    class Texts:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> dict[str, list[int]]:
            asked.append(number)
            return {"ids": list(range(4))}

    packed = weft.Packed(Texts(), 3, lengths=[4, 4, 4], key="ids")
    assert not asked
    assert packed[3]["tokens"].tolist() == [1, 2, 3]
    assert packed[3]["text"].tolist() == [2, 2, 2]
    assert asked == [2, 2]


def test_rows_of_a_loader() -> None:
    loader = weft.Loader(weft.Packed(texts([9, 4, 8, 3]), 4), 2, shuffle=True, seed=1)
    found = torch.cat([batch["tokens"] for batch in loader]).flatten()
    assert sorted(found.tolist()) == torch.cat(texts([9, 4, 8, 3])).tolist()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], 0), "length must be"),
        ((iter([]), 2), "must be a dataset"),
        (([torch.zeros(2, 2)], 2), r"text 0 is torch.float32\[2, 2\]"),
    ],
)
def test_wrong_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        weft.Packed(*arguments)


def test_wrong_lengths() -> None:
    with pytest.raises(UserError, match="for each of the 2 texts, got \\[3\\]"):
        weft.Packed(texts([3, 3]), 2, lengths=[3])
    with pytest.raises(UserError, match="text 1 has 3 tokens, and lengths says 4"):
        weft.Packed(texts([3, 3]), 2, lengths=[3, 4])[2]
