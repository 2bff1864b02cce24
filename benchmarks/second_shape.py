"""Seconds to plan for the first shape of a batch (`weft.compile`, a step), and for a second one (a step).

    OMP_NUM_THREADS=1 python -m benchmarks.second_shape --repeats 5

A GPT, a BERT and a Llama of 12 layers, trained with AdamW by ranks in one process; of both shapes also the parts.
Seconds are the processor's, medians of rounds through all cases. Both shapes run a step, whose seconds once it is
planned are given too; `ratio` is that of all seconds, `ratio of planning` without those. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn

import weft
from benchmarks.measure import save
from benchmarks.plan_time import timed
from examples.gpt_model import GPT
from examples.gpt_model import loss_fn as gpt_loss
from examples.models.huggingface import FAMILIES
from weft.capture.tracing.step_call import StepCall
from weft.program.planning.variants import Variant

LENGTH, WIDTH, VOCABULARY = 64, 128, 256
# What is timed: the part, where the function is looked up, and its name there.
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("forward", StepCall, "_forward"),
    ("backward", StepCall, "_gradients"),
    ("optimizer", import_module("weft.capture.capture"), "update_rules"),
    ("capture", import_module("weft.program.planning.step"), "capture"),
    ("deduction", import_module("weft.compiler.stages.lay_out"), "deduce"),
    ("plan", import_module("weft.compiler.pipeline"), "lower"),
    ("passes", import_module("weft.program.planning.variants"), "compile_graph"),
    ("start", import_module("weft.program.planning.variants"), "build"),
    ("step", Variant, "step"),
)
# Of a part, what is timed as others already.
WITHIN = {"capture": ("forward", "backward", "optimizer"), "passes": ("deduction", "plan")}


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, length))
    return {"x": tokens, "y": tokens}


def gpt(layers: int) -> nn.Module:
    return GPT(layers, WIDTH, heads=4, length=LENGTH, vocabulary=VOCABULARY)


def huggingface(family: str) -> Callable[[int], nn.Module]:
    """Makes models of transformers with so many layers."""

    def make(layers: int) -> nn.Module:
        made = FAMILIES[family]
        sizes = {
            "hidden_size": WIDTH,
            "intermediate_size": 4 * WIDTH,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": LENGTH,
            "vocab_size": VOCABULARY,
            "num_hidden_layers": layers,
        }
        config = getattr(transformers, made.config)(**{**made.sizes, **sizes})
        model: nn.Module = getattr(transformers, made.model)(config)
        return model

    return make


def labelled(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch["x"], labels=batch["y"]).loss
    return loss


WHOLE = weft.data_parallel()
LLAMA = [f"*.{name}_proj" for name in ("q", "k", "v", "gate", "up")], ["*.o_proj", "*.down_proj"]
BERT = ["*.query", "*.key", "*.value", "*.intermediate.dense"], ["*.output.dense"]
MODELS = {
    "gpt": (gpt, gpt_loss, (["blocks.*.up"], ["blocks.*.down"])),
    "bert": (huggingface("bert"), labelled, BERT),
    "llama": (huggingface("llama"), labelled, LLAMA),
}


def strategies(columns: list[str], rows: list[str]) -> dict[str, weft.Strategy]:
    return {
        "data_parallel": WHOLE,
        "zero3": replace(WHOLE, zero=weft.Zero(3)),
        "tensor_parallel": weft.tensor_parallel(columns, rows),
        "pipeline": weft.Strategy(stages=2, micro_batches=4),
    }


@contextmanager
def parts_timed(spent: dict[str, float]) -> Iterator[None]:
    """While this lasts, the seconds of each part are added up."""
    with ExitStack() as stack:
        for part, where, name in PARTS:
            stack.enter_context(patch.object(where, name, timed(part, getattr(where, name), spent)))
        yield


def seconds_of(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the processor, and of the clock, in all and part by part, of a call."""
    spent: dict[str, float] = {}
    began, start = time.perf_counter(), time.process_time()
    with parts_timed(spent):
        call()
    spent |= {"all": time.process_time() - start, "clock": time.perf_counter() - began}
    for part, inner in WITHIN.items():
        spent[part] -= sum(spent.get(each, 0.0) for each in inner)
    return spent


def measure(model: str, strategy: str, layers: int, ranks: int) -> dict[str, dict[str, float]]:
    """Seconds for the first and the second shape, and of a step that is planned."""
    make, loss_fn, split = MODELS[model]
    torch.manual_seed(0)
    trained = make(layers)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    first, second = batch(8, LENGTH), batch(8, LENGTH - 16)
    made = []

    def start() -> None:
        made.append(
            weft.compile(
                trained,
                loss_fn,
                optimizer,
                first,
                placement=weft.placement("cpu", list(range(ranks))),
                strategy=strategies(*split)[strategy],
            )
        )
        made[0].step(first)

    with weft.local_world(ranks):
        before = seconds_of(start)
        after = seconds_of(lambda: made[0].step(second))
        step = seconds_of_step(made[0], second)
        made[0].close()
    return {"first": before, "second": after, "step": step}


def seconds_of_step(program: weft.Program, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    start = time.process_time()
    program.step(batch)
    return {"all": time.process_time() - start}


def medians(runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Of each side and part, the median of all runs; and of the ratios of the sides."""
    found: dict[str, Any] = {
        side: {
            part: round(statistics.median(run[side].get(part, 0.0) for run in runs), 3)
            for part in runs[0][side]
        }
        for side in runs[0]
    }
    ratios = [run["second"]["all"] / run["first"]["all"] for run in runs]
    found["ratio"] = round(statistics.median(ratios), 3)
    planning = [
        (run["second"]["all"] - run["step"]["all"]) / (run["first"]["all"] - run["step"]["all"])
        for run in runs
    ]
    found["ratio of planning"] = round(statistics.median(planning), 3)
    found["ratios"] = [round(ratio, 3) for ratio in ratios]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    known = strategies([], [])
    parser.add_argument("--strategies", nargs="+", choices=known, default=list(known))
    o = parser.parse_args()
    cases = [(model, strategy) for model in o.models for strategy in o.strategies]
    for model in o.models:
        measure(model, "data_parallel", 1, o.ranks)  # what is done once in a process
    runs: dict[str, list[dict[str, dict[str, float]]]] = {}
    for _ in range(o.repeats):
        for model, strategy in cases:
            run = measure(model, strategy, o.layers, o.ranks)
            runs.setdefault(f"{model}, {strategy}", []).append(run)
    result = {case: medians(each) for case, each in runs.items()}
    for case, each in result.items():
        print(f"{case}: first {each['first']}", flush=True)
        print(f"{' ' * len(case)}  second {each['second']}, ratio {each['ratio']}", flush=True)
    sizes = {"layers": o.layers, "ranks": o.ranks, "repeats": o.repeats}
    save("second_shape", {**sizes, "seconds": result, "bound": "ratio of planning <= 0.5"})


if __name__ == "__main__":
    main()
