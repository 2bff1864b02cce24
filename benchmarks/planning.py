"""Seconds and memory to capture and plan large steps, none of which is run: many ranks, many layers, many strategies.

    OMP_NUM_THREADS=1 python -m benchmarks.planning --cases gpt/8x64 llama_70b/hybrid llama_405b/16384

Models are on the meta device. Each case is a process of its own, so that its memory is its own. Seconds are the
processor's, phase by phase; memory is the largest resident set, capture and torch included. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch

import weft
from benchmarks.measure import save
from benchmarks.models import LLAMA_70B, LLAMA_405B, Decoder, LlamaSizes, gpt, llama
from weft.layout import Placement
from weft.planning.plans import plan_stored
from weft.planning.progress import uncollected

GPT = Decoder(24, 1024, 16)
MICRO_BATCHES = 16
LAYER = "model.layers.*."
COLUMNS = [
    *(f"{LAYER}self_attn.{name}_proj" for name in "qkv"),
    *(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up")),
]
ROWS = [f"{LAYER}self_attn.o_proj", f"{LAYER}mlp.down_proj"]
WHOLE = weft.Strategy(batch={"*": weft.split(0)}, parameters={"*": weft.broadcast})
HYBRID = weft.hybrid_parallel(COLUMNS, ROWS)


@final
@dataclass(frozen=True)
class Case:
    """A step to plan.

    Attributes:
        job: makes it.
        grid: shape of the ranks.
        strategy: made for the placement.
    """

    job: Callable[[], weft.Job]
    grid: tuple[int, ...]
    strategy: Callable[[Placement], weft.Strategy]

    @property
    def placement(self) -> Placement:
        """Ranks from 0 on."""
        ranks = torch.arange(torch.Size(self.grid).numel())
        return weft.placement("cpu", ranks.view(self.grid).tolist())


def cases(gpt_layers: int, llama_layers: int | None) -> dict[str, Case]:
    """By name; of the Llamas so many layers, or all that they have."""
    decoder = replace(GPT, layers=gpt_layers)
    piped = replace(WHOLE, stages=8, micro_batches=MICRO_BATCHES)
    found = {"gpt/8": Case(partial(gpt, decoder, 8 * MICRO_BATCHES), (8,), lambda _: WHOLE)}
    for data in (4, 16, 64, 256):
        job = partial(gpt, decoder, MICRO_BATCHES * data)
        found[f"gpt/8x{data}"] = Case(job, (8, data), lambda _: piped)
    seventy = _with_layers(LLAMA_70B, llama_layers)
    for name, (strategy, grid) in strategies().items():
        job = partial(llama, seventy, 4 * 64, 4096)
        found[f"llama_70b/{name}"] = Case(job, grid, partial(_given, strategy))
    largest = _with_layers(LLAMA_405B, llama_layers)
    for data in (2, 16, 128):
        staged = partial(_in_stages, layers=largest.layers, count=16)
        found[f"llama_405b/{128 * data}"] = Case(
            partial(llama, largest, 2048), (16 * data, 8), staged
        )
    return found


def _with_layers(sizes: LlamaSizes, layers: int | None) -> LlamaSizes:
    return replace(sizes, layers=layers or sizes.layers)


def _given(strategy: weft.Strategy, _: Placement) -> weft.Strategy:
    return strategy


def strategies() -> dict[str, tuple[weft.Strategy, tuple[int, ...]]]:
    """Strategies of 64 ranks by name, each with its grid."""
    line, grid = (64,), (8, 8)
    found: dict[str, tuple[weft.Strategy, tuple[int, ...]]] = {
        "data_parallel": (WHOLE, line),
        "zero1": (replace(WHOLE, zero=weft.Zero(1)), line),
        "zero2": (replace(WHOLE, zero=weft.Zero(2)), line),
        "zero3": (replace(WHOLE, zero=weft.Zero(3)), line),
        "tensor_parallel": (weft.tensor_parallel(COLUMNS, ROWS), line),
        "tensor_sequence": (weft.tensor_parallel(COLUMNS, ROWS, sequence=1), line),
        "hybrid": (HYBRID, grid),
        "recompute": (replace(WHOLE, recompute=("model.layers.*",)), line),
    }
    for stages in (4, 8):
        for zero, suffix in ((None, ""), (weft.Zero(1), "_zero1")):
            own: dict[str, Any] = {"stages": stages, "micro_batches": 8, "zero": zero}
            plain, tensor = replace(WHOLE, **own), replace(HYBRID, **own)
            found[f"pipeline_{stages}{suffix}"] = plain, (stages, 64 // stages)
            found[f"pipeline_{stages}_tensor{suffix}"] = tensor, grid
    return found


def _in_stages(placement: Placement, layers: int, count: int) -> weft.Strategy:
    """Tensor parallel, 1F1B and ZeRO 1; the stages at both ends have fewer layers, the embedding and the head."""
    rows = placement.shape[0] // count
    width = len(placement.ranks) // count
    ends = [0, *((layers + 2) * number // count - 1 for number in range(1, count)), layers]
    stages = []
    for stage in range(count):
        names = [f"model.layers.{layer}" for layer in range(ends[stage], ends[stage + 1])]
        names += ["model.embed_tokens", "model.rotary_emb"] if stage == 0 else []
        names += ["model.norm", "lm_head"] if stage == count - 1 else []
        ranks = placement.ranks[stage * width : (stage + 1) * width]
        stages.append(weft.Stage(names, Placement("cpu", (rows, *placement.shape[1:]), ranks)))
    return replace(
        HYBRID,
        stages=tuple(stages),
        micro_batches=MICRO_BATCHES,
        schedule="1f1b",
        zero=weft.Zero(1),
    )


@uncollected()
def planned(case: Case) -> dict[str, Any]:
    """Seconds of each phase of a case, and what it took."""
    placement, job = case.placement, case.job()
    strategy = case.strategy(placement)
    marks = [("capturing", time.process_time())]

    def begin(phase: str) -> None:
        marks.append((phase, time.process_time()))

    step = job.stored(strategy=strategy)
    begin("reading the strategy")
    compiled = plan_stored(step, strategy, placement, begin=begin)
    ends = [*(start for _, start in marks[1:]), time.process_time()]
    seconds = {name: round(end - start, 2) for (name, start), end in zip(marks, ends, strict=True)}
    return {
        "ranks": len(placement.ranks),
        "planned": len(set(compiled.schedule.classes.values())) or 1,
        "nodes": len(compiled.graph.nodes),
        "GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "fingerprint": compiled.fingerprint[:16],
        "seconds": seconds,
        "all of planning": round(ends[-1] - ends[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = list(cases(1, 2))
    parser.add_argument("--cases", nargs="+", choices=known, default=known)
    parser.add_argument("--gpt-layers", type=int, default=GPT.layers)
    parser.add_argument("--llama-layers", type=int, help="of all, where fewer are wanted")
    parser.add_argument(
        "--here", action="store_true", help="in this process, and only the first case"
    )
    o = parser.parse_args()
    if o.here:
        print(json.dumps(planned(cases(o.gpt_layers, o.llama_layers)[o.cases[0]])))
        return
    sizes = ["--gpt-layers", str(o.gpt_layers)]
    sizes += ["--llama-layers", str(o.llama_layers)] if o.llama_layers else []
    rows: dict[str, Any] = {}
    for name in o.cases:
        command = [sys.executable, "-m", "benchmarks.planning", "--here", "--cases", name, *sizes]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows[name] = json.loads(told.splitlines()[-1])
        print(f"{name}: {rows[name]}", flush=True)
    bound = "capturing <= 20 s; of llama_70b all of planning <= 15 s"
    save("planning", {"micro_batches": MICRO_BATCHES, "cases": rows, "bound": bound})


if __name__ == "__main__":
    main()
