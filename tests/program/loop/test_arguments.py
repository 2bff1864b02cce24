"""Arguments of `weft.fit` that cannot be: refused before a step, with what would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import UserError

X = torch.ones(4, 3)


@pytest.fixture(scope="module")
def program() -> Iterator[weft.Program]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.local_world(1):
        where = weft.placement("cpu", [0])
        made = weft.compile(model, lambda m, x: m(x).sum(), optimizer, X, placement=where)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"log": 3}, "log must be a list"),
        ({"log": weft.logs.JsonLines("figures")}, "log must be a list, also of a single one"),
        ({"log": [3]}, "log must be logs"),
        ({"schedulers": 3}, "schedulers must be a list"),
        ({"schedulers": [3]}, "schedulers must be what steps"),
        ({"checkpoint": "folder"}, r"must be a weft.Checkpoints\(folder\), got 'folder'"),
        ({"extra": [1]}, "extra must be a dict"),
        ({"evaluate": 3}, "evaluate must be a function, got 3"),
        ({"stop": 3}, "stop must be a function, got 3"),
        ({"program": None}, "the program that weft.compile gives, got None"),
        ({"loader": 3}, "batches that can be looped over, such as a weft.Loader, got 3"),
        ({"steps": 0}, "steps must be a number from 1, got 0"),
        ({"steps": None}, "give steps or epochs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_cannot_be_is_refused_before_a_step(
    program: weft.Program, arguments: dict[str, Any], told: str
) -> None:
    given: dict[str, Any] = {"program": program, "loader": [X], "steps": 1, **arguments}
    with pytest.raises(UserError, match=f"weft.fit: .*{told}"):
        weft.fit(given.pop("program"), given.pop("loader"), **given)
    assert program.steps == 0


@pytest.mark.parametrize("path", [None, 3, ""])
def test_a_log_takes_the_path_of_a_file(path: Any) -> None:
    with pytest.raises(UserError, match="weft.logs: path must be the path of a file, got"):
        weft.logs.JsonLines(path)
