"""What must hold of any search: no hand strategy is quicker, budget and memory are kept, a second one is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import weft
from benchmarks.models import GPT_8, GPT_24, HALF, LLAMA_8B, Decoder, gpt, llama, mlp, stored
from benchmarks.search.hands import GPT_SHAPE, LLAMA_SHAPE, MLP_SHAPE, Beside, Shape, by_hand
from benchmarks.search.trial import Finding, Searched, Trial, searched, seconds_text
from weft.planning.machine import machine_of
from weft.planning.stored_step import StoredStep


def _never_worse(
    name: str,
    job: Callable[[], weft.Job],
    shape: Shape,
    blocks: int,
    samples: int,
    base: weft.Strategy | None = HALF,
) -> Beside:
    """No strategy by hand is quicker; `name` ends in the machine."""
    topology = name.rpartition(" ")[2]
    whole = replace(shape, blocks=blocks, samples=samples)
    return Beside(
        what=name,
        job=job,
        topology=topology,
        plans=lambda: by_hand(machine_of(topology).devices, whole),
        base=base,
        least=1 - 1e-9,
        target="<= the best of data parallel, ZeRO, Megatron grids, pipelines",
        patience=HANDS,
    )


# Seconds that the hand strategies of a model may take, all together.
HANDS = 240.0
MODELS = (
    _never_worse("gpt-8 on h100x8", partial(gpt, GPT_8, 64), GPT_SHAPE, 8, 64),
    _never_worse("gpt-8 on v100x16", partial(gpt, GPT_8, 64), GPT_SHAPE, 8, 64),
    _never_worse("gpt-24 on a100-40gbx32", partial(gpt, GPT_24, 256), GPT_SHAPE, 24, 256),
    _never_worse("mlp on flexflow-k80x8", partial(mlp, 8192, 4, 512), MLP_SHAPE, 1, 512, base=None),
    _never_worse("llama-8b on h100x64", partial(llama, LLAMA_8B, 256), LLAMA_SHAPE, 32, 256),
)
SMALL = Decoder(4, 256, 4, 256, 1024)
# Of second searches.
PINS = {
    "ZeRO 3": weft.Strategy(zero=weft.Zero(3)),
    "4 micro-batches": weft.Strategy(micro_batches=4),
    "one parameter whole": weft.Strategy(parameters={"head.weight": weft.broadcast}),
    "a block that runs again": weft.Strategy(recompute=("blocks.0",)),
}


def trials() -> list[Trial]:
    """One for each property, and for each model."""
    return [
        *(Trial(f"holds/never worse, {each.what}", each.tried) for each in MODELS),
        Trial("holds/budget", _budget),
        Trial("holds/memory limit", _limit),
        Trial("holds/second search", _second),
        Trial("holds/same seed", _same),
    ]


def _budget(_: float) -> Sequence[Finding]:
    """Searches of several lengths, of a step whose plans take some tenths of a second each."""
    step = stored(gpt(GPT_8, 64))
    lines = []
    for asked in (2.0, 5.0, 15.0):
        made = searched(step, "h100x8", seconds=asked)
        assert not isinstance(made, str), made
        told = f"{made.took:.2f} s, {len(made.result.tried)} planned"
        held = made.took <= 1.05 * asked
        why = "" if held else "the last plan, or what comes before the first"
        lines.append(
            Finding(f"budget of {asked:g} s, GPT of 8 layers", "within 5 %", told, held, why)
        )
    return lines


def _limit(seconds: float) -> Sequence[Finding]:
    """Limits from what data parallel takes downward."""
    step = stored(gpt(GPT_8, 64))
    plain = weft.simulate(step, weft.data_parallel(), "h100x8").memory
    assert plain is not None
    lines = []
    for part in (1.0, 0.6, 0.3, 0.15):
        limit = int(part * plain.total)
        what = f"memory limit of {limit / 1e9:.2f} GB, {part:.0%} of data parallel"
        made = searched(step, "h100x8", seconds=seconds, memory_limit=limit)
        if isinstance(made, str):
            lines.append(Finding(what, "never exceeded", f"refused: {made}", None))
            continue
        held = made.result.simulation.memory
        assert held is not None
        told = f"{held.total / 1e9:.2f} GB: {made}"
        lines.append(Finding(what, "never exceeded", told, held.total <= limit))
    return lines


def _second(seconds: float) -> Sequence[Finding]:
    """One thing pinned: from what the first search found, in a tenth of its time, and anew in all of it."""
    step, topology = stored(gpt(GPT_8, 64)), "h100x8"
    first = searched(step, topology, seconds=seconds)
    assert isinstance(first, Searched), first
    took = first.took
    lines = []
    for pin, fixed in PINS.items():
        made = searched(step, topology, seconds=0.1 * took, fixed=fixed, start=first.result)
        assert isinstance(made, Searched), made
        second, again = made.result, made.took
        anew = weft.search(step, topology, seconds=seconds, fixed=fixed)
        told = (
            f"{again / took:.1%}: {took:.1f} s, then {again:.2f} s: {seconds_text(second.seconds)}; "
            f"anew in {seconds:g} s {seconds_text(anew.seconds)}"
        )
        quick, good = again <= 0.105 * took, second.seconds <= 1.01 * anew.seconds
        why = "" if quick and good else "slower than 10 %" if good else "a search anew finds better"
        target = "<= 10 % of the first, within 1 % of a search anew"
        lines.append(Finding(f"a second search, {pin}", target, told, quick and good, why))
    return lines


def same_plan() -> str:
    """The strategy of a search of few moves, as text: what processes compare."""
    step: StoredStep = stored(gpt(SMALL, 16))
    return weft.search(step, "v100x4", moves=20, seed=3).best.to_text()


def _same(_: float) -> Sequence[Finding]:
    """In two processes whose sets and dicts have other orders of hashes."""
    code = (
        "import json; from benchmarks.search.holds import same_plan; print(json.dumps(same_plan()))"
    )
    texts = []
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        texts.append(json.loads(told.stdout.splitlines()[-1]))
    equal = texts[0] == texts[1]
    return [Finding("same seed and moves", "same plan", "equal" if equal else "differ", equal)]
