"""Values that Python reads of tensors from outside, written in place between steps: planned anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from beside_plain import Both, squares


class Scaled(nn.Linear):
    """Holds tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.pair, self.all = torch.tensor([2.0, 4.0]), {"rates": [torch.tensor([2.0, 4.0])]}


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda model: model.pair, "pair"),
    "containers": (lambda model: model.all["rates"][0], "all['rates'][0]"),
}


@pytest.mark.parametrize(("place", "name"), PLACES.values(), ids=PLACES)
def test_values_in_the_model(
    place: Callable[[Any], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weft")
    torch.manual_seed(0)
    with weft.local_world(2):
        both = Both(Scaled(), lambda model, batch: squares(model, batch) * place(model).tolist()[1])
        both.step()
        both.change(lambda model: place(model).numpy().__setitem__(1, 3.0))
        both.step()
        both.step()
        both.change(lambda model: place(model).fill_(4.0))
        both.step()
    planned = [text for text in caplog.messages if "planned the step again" in text]
    assert len(planned) == 2
    assert f"the values of {name} was [2.0, 4.0] and is [2.0, 3.0]" in planned[0]
