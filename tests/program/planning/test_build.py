"""Processes that compile different programs are told what differs, and what each must do."""

from __future__ import annotations

import pytest

from weft.errors import UserError
from weft.program.planning.build import _check_lines


@pytest.mark.parametrize(
    ("one", "two", "must"),
    [
        ("the batch x float32[33, 16]", "the batch x float32[30, 16]", "as many rows"),
        ("the batch x float32[4]", "the parameter w float32[4]", "the same model, loss function"),
        ("aten.relu.default -> float32[4]", "nothing more", "the same model, loss function"),
    ],
)
def test_the_advice_is_for_what_differs(one: str, two: str, must: str) -> None:
    same = ("the parameter v float32[2]", "")
    with pytest.raises(UserError, match=rf"on rank 0, .* on rank 2; .*{must}"):
        _check_lines("the step has", [same, (one, "")], [same, (two, "")], 2)
