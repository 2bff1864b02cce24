"""Settings that libraries read of an object of theirs, changed between steps: the `config` of `transformers`."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

from transformers import T5Config, T5ForConditionalGeneration

import weft


def loss_fn(model: Any, batch: torch.Tensor) -> Any:
    return model(input_ids=batch, labels=batch).loss


@pytest.mark.thorough
def test_a_flag_that_a_library_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weft")
    torch.manual_seed(0)
    sizes: dict[str, int] = {"num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    sizes["decoder_start_token_id"] = 0
    config = T5Config(**sizes, vocab_size=32, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config).double()
    plain = copy.deepcopy(model)
    one, other = (torch.optim.SGD(x.parameters(), lr=0.1) for x in (model, plain))
    batch = torch.randint(32, (4, 6))
    program = weft.compile(model, loss_fn, one, batch, placement=weft.placement("cpu", [0]))
    for scaled in (True, True, False, False):
        model.config.scale_decoder_outputs = plain.config.scale_decoder_outputs = scaled
        other.zero_grad()
        loss = loss_fn(plain, batch)
        loss.backward()
        other.step()
        assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-9)
    program.close()
    words = [text for text in caplog.messages if "planned the step again" in text]
    assert len(words) <= 2
    assert "config.scale_decoder_outputs was" in words[-1]
