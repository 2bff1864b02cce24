"""Searches where memory is tight: limits a thousandth above what each of the best strategies by hand takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, final

import weft
from benchmarks.models import GPT_8, HALF, Decoder, gpt, mlp, stored
from benchmarks.search.hands import GPT_SHAPE, Hand, Shape, by_hand, simulated
from benchmarks.search.trial import Finding, Trial, searched, seconds_text
from weft.planning.machine import machine_of
from weft.planning.stored_step import StoredStep

# A limit is so many times what a strategy takes.
_ABOVE = 1.001
# Of strategies whose bytes differ by less than so many times, the slower one is no smaller.
_SMALLER = 1.001


@final
class Work(NamedTuple):
    """A step on a machine, and what its strategies by hand are written with; `base` has the step's precision."""

    make: Callable[[], weft.Job]
    topology: str
    shape: Shape
    blocks: int
    samples: int
    base: weft.Strategy | None = None


WORKS = {
    "gpt-4 on v100x4": Work(
        lambda: gpt(Decoder(4, 1024, 16, 512, 8192), 32), "v100x4", GPT_SHAPE, 4, 32
    ),
    "gpt-12 on a100-40gbx8": Work(
        lambda: gpt(Decoder(12, 1024, 16, 1024, 32000), 64), "a100-40gbx8", GPT_SHAPE, 12, 64, HALF
    ),
    "gpt-8 on v100x16": Work(lambda: gpt(GPT_8, 64), "v100x16", GPT_SHAPE, 8, 64, HALF),
    "mlp on flexflow-k80x8": Work(
        lambda: mlp(4096, 6, 4096),
        "flexflow-k80x8",
        Shape(columns=("0", "4", "8"), rows=("2", "6", "10")),
        1,
        4096,
    ),
}


def trials() -> list[Trial]:
    """One for each work."""
    return [Trial(f"tight/{name}", partial(_tight, name)) for name in WORKS]


def _tight(name: str, seconds: float) -> Sequence[Finding]:
    work = WORKS[name]
    step = stored(work.make(), work.base)
    hands = _fastest(step, work)
    return [_one(name, step, work.topology, hands, hand, seconds) for hand in hands]


def _one(
    name: str, step: StoredStep, topology: str, hands: Sequence[Hand], hand: Hand, seconds: float
) -> Finding:
    limit = int(_ABOVE * hand.memory)
    what = f"{name}, {limit / 1e9:.2f} GB, {seconds:g} s"
    target = "<= the best by hand that fits"
    said = f"by hand {hand.name} {seconds_text(hand.seconds)}"
    made = searched(step, topology, seconds=seconds, memory_limit=limit)
    if isinstance(made, str):
        return Finding(what, target, f"nothing; {said}", False, made)
    ratio = hand.seconds / made.result.seconds
    told = f"{ratio:.3f} times as fast: {made}; {said}"
    return Finding(what, target, told, ratio >= 1 - 1e-9, "", {"ratio": ratio})


def _fastest(step: StoredStep, work: Work) -> list[Hand]:
    """Strategies by hand of which no other is as quick and as small, the quickest first."""
    devices = machine_of(work.topology).devices
    shape = replace(work.shape, blocks=work.blocks, samples=work.samples)
    found = list[Hand]()
    for name, strategy in _all_by_hand(devices, shape):
        one = simulated(step, work.topology, name, strategy)
        if not isinstance(one, str) and one.fits:
            found.append(one)
    best = list[Hand]()
    for one in sorted(found, key=lambda each: (each.seconds, each.memory)):
        if not best or one.memory < best[-1].memory / _SMALLER:
            best.append(one)
    return best


def _all_by_hand(devices: int, shape: Shape) -> Iterator[tuple[str, weft.Strategy]]:
    """Those of `by_hand`, and data parallel with each ZeRO level, micro-batches, and all blocks run again or none."""
    yield from by_hand(devices, shape)
    for level in (0, 1, 2, 3):
        for micro in (1, 2, 4):
            for again in ((), ("blocks.*",)) if shape.blocks > 1 else ((),):
                strategy = replace(
                    weft.data_parallel(),
                    zero=weft.Zero(level) if level else None,  # type: ignore[arg-type]
                    micro_batches=micro,
                    recompute=again,
                    grid=(devices,),
                )
                yield (
                    f"ZeRO {level}, {micro} micro-batches{', recomputed' if again else ''}",
                    strategy,
                )
