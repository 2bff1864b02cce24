"""A Llama of `transformers`, as that library builds it, on the source text of Python's standard library.

    weft run -n 2 examples/llama.py --strategy tensor

The model comes from a config: nothing is downloaded. The strategies name its layers as `transformers` does. Tensor
parallel: heads, feed-forward nets and the vocabulary are split over the ranks. Pipeline: each rank has half of the
layers, and the batch goes through in four parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from example_text import text_batches
from gallery import Plain, Run
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import weft

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    use_cache=False,
)

_LINEARS = weft.tensor_parallel(
    ["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"],
    ["*.o_proj", "*.down_proj"],
)
_WORDS = {"*.embed_tokens.weight": weft.split(0), "lm_head.weight": weft.split(0)}
STRATEGIES = {
    "tensor": replace(_LINEARS, parameters={**_LINEARS.parameters, **_WORDS}),
    "pipeline": weft.Strategy(
        stages=[
            weft.Stage(
                ["model.embed_tokens", "model.rotary_emb", "model.layers.[0-1]"],
                placement=weft.placement("cpu", [0]),
            ),
            weft.Stage(
                ["model.layers.[2-3]", "model.norm", "lm_head"],
                placement=weft.placement("cpu", [1]),
            ),
        ],
        micro_batches=4,
        schedule="1f1b",
    ),
}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of the next byte, as the model computes it from the labels."""
    return model(input_ids=batch["x"], labels=batch["x"]).loss


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 60, words)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
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
