"""What `import weft` offers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import UserError

NAMES = (getattr(weft, name) for name in weft.__all__)
CLASSES = [value for value in NAMES if inspect.isclass(value)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.final leaves no mark before")
@pytest.mark.parametrize("public", CLASSES, ids=lambda public: public.__name__)
def test_public_classes_are_not_meant_to_be_extended(public: type) -> None:
    assert getattr(public, "__final__", False), f"{public} is neither @final nor a documented base"
    assert public.__doc__


def test_the_names_that_completion_offers() -> None:
    assert dir(weft) == sorted(weft.__all__)
    assert all(getattr(weft, name) is not None for name in dir(weft))


Given = Callable[[Any], object]
WRONG: dict[str, tuple[Given, Any, str]] = {
    "ranks": (lambda x: weft.placement("cpu", x), ["a"], "full grid of ranks .* got 'a'"),
    "one rank": (lambda x: weft.placement("cpu", x), 2, "full grid of ranks .* got 2"),
    "no ranks": (lambda x: weft.placement("cpu", x), None, "full grid of ranks .* got None"),
    "dimension": (weft.split, 1.5, "must be a dimension, .* got 1.5"),
    "columns": (
        weft.tensor_parallel,
        "abc",
        "columns must be a list of name patterns such as .* got 'abc'",
    ),
    "rows": (
        lambda x: weft.hybrid_parallel(["a"], x),
        [None],
        "rows must be a list of name patterns",
    ),
    "experts": (weft.expert_parallel, 3, "experts must be a list of name patterns"),
    "whole": (
        lambda x: weft.context_parallel(whole=x),
        "a",
        "whole must be a list of name patterns",
    ),
    "text": (
        lambda x: weft.Strategy.from_text(x, "a"),
        3,
        "from_text: text must be a text, .* got 3",
    ),
    "world": (lambda x: weft.local_world(x).__enter__(), 1.5, "at least one rank, got 1.5"),
    "model": (lambda x: _compiled(x), 3, "must be a torch.nn.Module with its loss_fn, .* got 3"),
    "optimizer": (
        lambda x: _compiled(torch.nn.Linear(2, 2), optimizer=x),
        [torch.zeros(999)],
        r"optimizer= must be .* got \[tensor\(.{0,40}\]$",
    ),
    "metrics": (lambda x: _compiled(metrics=x), 3, "metrics= must be a list of names .* got 3"),
    "shapes": (lambda x: _compiled(shapes=x), 3, "shapes= must be a weft.Buckets, got 3"),
    "update": (lambda x: _compiled().step(torch.zeros(2, 2), x), "x", "True or False, got 'x'"),
}


def _compiled(model: Any = None, **options: Any) -> weft.Program:
    own = nn.Linear(2, 2)
    return weft.compile(
        own if model is None else model,
        lambda model, batch: model(batch).sum(),
        **{"optimizer": torch.optim.SGD(own.parameters(), 0.1), **options},
        example_batch=torch.zeros(2, 2),
        placement=weft.placement("cpu", [0]),
    )


@pytest.mark.parametrize("case", WRONG)
def test_arguments_of_another_kind_are_told(case: str) -> None:
    call, given, message = WRONG[case]
    with weft.local_world(1), pytest.raises(UserError, match=message):
        call(given)
