"""`generate` of transformers on a live model, whose weights are split over ranks: the tokens of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import weft

transformers = pytest.importorskip("transformers")

COLUMNS = ["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj", "lm_head"]
STRATEGIES = {
    "tensor": weft.tensor_parallel(columns=COLUMNS, rows=["*.o_proj", "*.down_proj"]),
    "sharded": weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).double()


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss


@pytest.mark.parametrize(("name", "beams"), [("tensor", 1), ("tensor", 2), ("sharded", 1)])
def test_it_writes_what_one_device_writes(name: str, beams: int) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    own, other = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    tokens = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    with weft.local_world(2):
        program = weft.compile(
            model,
            loss_fn,
            own,
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=STRATEGIES[name],
        )
        for _ in range(2):
            program.step(batch)
            other.zero_grad()
            loss_fn(plain, batch).backward()
            other.step()
        with torch.no_grad():
            found = model.generate(tokens[:2, :5], **options)
            expected = plain.generate(tokens[:2, :5], **options)
        assert torch.equal(
            found.full() if isinstance(found, weft.GlobalTensor) else found, expected
        )
        assert not torch.equal(expected, llama().generate(tokens[:2, :5], **options))
        program.step(batch)
        program.close()
