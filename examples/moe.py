"""A mixture of experts: Mixtral of `transformers` on the source text of Python's standard library.

    weft run -n 2 examples/moe.py --strategy experts

The model comes from a config: nothing is downloaded. Expert parallel: each rank has half of the experts, and the rows
of the batch travel to those that the router chose, by all-to-all. ZeRO: parameters, gradients and states lie in shards,
and are gathered where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from example_text import text_batches
from gallery import Plain, Run
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import weft

CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    num_local_experts=8,
    num_experts_per_tok=2,
    use_cache=False,
)
STRATEGIES = {
    "experts": weft.expert_parallel(["*.experts.*"]),
    "zero": replace(weft.data_parallel(), zero=weft.Zero(3)),
}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of the next byte, as the model computes it from the labels."""
    return model(input_ids=batch["x"], labels=batch["x"]).loss


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 60, words)
    torch.manual_seed(0)
    model = MixtralForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plain = Plain(model, (loss_fn, optimizer))
    batches = [{"x": batch["x"]} for batch in text_batches(run.steps)]
    with run.world():
        program = weft.compile(
            model, loss_fn, optimizer, batches[0], placement=run.placement, strategy=run.strategy
        )
        run.train(batches, plain, program)
        run.finish(program)


if __name__ == "__main__":
    main()
