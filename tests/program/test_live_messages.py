"""What a live model cannot do is said in words that name what would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from program.live_models import Net, batch, loss_fn, twins
from weft.errors import LayoutError

pytestmark = pytest.mark.timeout(60)


def test_a_scaler_of_gradients_is_refused() -> None:
    with twins("data") as both:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_fn(both.model, batch(1))).backward()
        with pytest.raises(LayoutError, match=r"GradScaler.*weft\.Precision\(compute=.fp16"):
            scaler.unscale_(both.optimizer)


def test_copies_of_before_compiling_do_not_follow() -> None:
    torch.manual_seed(0)
    model = Net()
    before: Any = torch.optim.swa_utils.AveragedModel(model)
    with twins("data", lambda: model) as both:
        words = r"are made after weft\.compile"
        with pytest.raises(LayoutError, match=words):
            before.update_parameters(both.model)
        with pytest.raises(LayoutError, match=words), torch.no_grad():
            nn.Linear(6, 8).double().weight.lerp_(both.model.first.weight, 0.1)
        after = torch.optim.swa_utils.AveragedModel(both.model)
        after.update_parameters(both.model)
