"""Plans that others have published, simulated, and what a search finds for the same step and machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import weft
from benchmarks.models import HALF, LLAMA_8B, Decoder, gpt, llama, mlp, stored, wide_resnet
from benchmarks.search.hands import GPT_SHAPE, LLAMA_SHAPE, Hand, simulated
from benchmarks.search.trial import Finding, Trial, searched, seconds_text

S, B = weft.split(0), weft.broadcast
FP16 = weft.Strategy(precision="fp16")
# Alpa's GPTs (arXiv 2201.12023, table 5), Galvatron's BERT-Huge-32 (arXiv 2211.13878, table 1) as a decoder.
GPT_1_3B = Decoder(24, 2048, 32, 1024, 51200)
GPT_6_7B = Decoder(32, 4096, 32, 1024, 51200)
HUGE_32 = Decoder(32, 1280, 16, 512, 30522)


@final
@dataclass(frozen=True)
class Published:
    """A step with the plans that others found for it.

    Attributes:
        what: the case, in words.
        job: makes the step.
        topology: of the machine.
        plans: by name.
        base: precision and micro-batches that all have in common.
        limit: bytes of a device, where they are fewer than it has.
    """

    what: str
    job: Callable[[], weft.Job]
    topology: str
    plans: Mapping[str, weft.Strategy]
    base: weft.Strategy = HALF
    limit: int | None = None


def _data(devices: int, level: int = 0, **more: object) -> weft.Strategy:
    zero = weft.Zero(level) if level else None  # type: ignore[arg-type]
    return replace(weft.data_parallel(), grid=(devices,), zero=zero, **more)  # type: ignore[arg-type]


def _megatron(data: int, tensor: int, **more: object) -> weft.Strategy:
    made = weft.hybrid_parallel(GPT_SHAPE.columns, GPT_SHAPE.rows)
    return replace(made, grid=(data, tensor), **more)  # type: ignore[arg-type]


def _mlp(data: int, tensor: int) -> weft.Strategy:
    """Columns and rows in turn, or data alone."""
    if tensor == 1:
        return _data(data)
    made = weft.hybrid_parallel(["0", "4"], ["2", "6"])
    return replace(made, grid=(data, tensor))


def _mixed(layers: int, level: int) -> weft.Strategy:
    """Galvatron's way to mix equal layers: some of them recomputed."""
    return _data(8, level, recompute=tuple(f"blocks.{number}" for number in range(layers)))


def _llama(data: int, tensor: int, level: int) -> weft.Strategy:
    if tensor == 1:
        return _data(data, level)
    made = weft.hybrid_parallel(LLAMA_SHAPE.columns, LLAMA_SHAPE.rows, sequence=1)
    return replace(made, grid=(data, tensor), zero=weft.Zero(level))  # type: ignore[arg-type]


CASES: dict[str, Published] = {
    "alpa mlp, many samples": Published(
        "Alpa, MLP of 4 layers of 1,024, 65,536 samples, 8 V100",
        *(partial(mlp, 1024, 4, 65536), "p3.16xlargex8"),
        {f"data {8 // t} x columns {t}": _mlp(8 // t, t) for t in (1, 2, 8)},
        base=weft.Strategy(),
    ),
    "alpa mlp, wide": Published(
        "Alpa, MLP of 4 layers of 8,192, 1,024 samples, 8 V100",
        *(partial(mlp, 8192, 4, 1024), "p3.16xlargex8"),
        {f"data {8 // t} x columns {t}": _mlp(8 // t, t) for t in (1, 2, 8)},
        base=weft.Strategy(),
    ),
    "alpa gpt-1.3b": Published(
        "Alpa, GPT-1.3B on 4 V100, 256 sequences",
        *(partial(gpt, GPT_1_3B, 256), "p3.16xlargex4"),
        {
            "2 stages x data 2": _data(
                4, stages=2, micro_batches=32, schedule="1f1b", recompute=("blocks.*",)
            ),
            "data 4, ZeRO 2": _data(4, 2, micro_batches=16, recompute=("blocks.*",)),
        },
        base=FP16,
    ),
    "alpa gpt-6.7b": Published(
        "Alpa, GPT-6.7B on 16 V100, 256 sequences",
        *(partial(gpt, GPT_6_7B, 256), "p3.16xlargex16"),
        {
            "2 stages x data 2 x tensor 4": replace(
                _megatron(4, 4),
                stages=2,
                micro_batches=16,
                schedule="1f1b",
                recompute=("blocks.*",),
            ),
            "data 2 x tensor 8, ZeRO 2": _megatron(
                2, 8, zero=weft.Zero(2), micro_batches=16, recompute=("blocks.*",)
            ),
        },
        base=FP16,
    ),
    "alpa wide-resnet": Published(
        "Alpa, Wide-ResNet 1B on 4 V100, 48 images",
        *(partial(wide_resnet, 320, 2, 48), "p3.16xlargex4"),
        {
            "data 4, ZeRO 2": _data(4, 2),
            "data, then channels": weft.Strategy(
                batch={"*": S},
                parameters={"body.1[3-5].body.*.weight": S, "*": B},
                grid=(4,),
            ),
        },
        base=weft.Strategy(),
    ),
    "galvatron": Published(
        "Galvatron, 32 equal layers of 1,280 on 8 devices, 128 sequences",
        *(partial(gpt, HUGE_32, 128), "a100-40gbx8"),
        {
            **{f"data 8, ZeRO 3, {n} layers recomputed": _mixed(n, 3) for n in (0, 8, 16, 24, 32)},
            **{f"data 8, {n} layers recomputed": _mixed(n, 0) for n in (8, 16, 24, 32)},
        },
        limit=12 * 10**9,
    ),
    "autoparallel llama-8b": Published(
        "autoparallel, Llama 3 8B on 64 H100, 128 sequences",
        *(partial(llama, LLAMA_8B, 128), "h100x64"),
        {
            "FSDP": replace(_llama(64, 1, 3), recompute=("model.layers.*",)),
            "FSDP 8 x TP 8": replace(_llama(8, 8, 3), recompute=("model.layers.*",)),
        },
    ),
}


def trials() -> list[Trial]:
    """A trial for each case."""
    return [Trial(f"published/{name}", partial(_tried, each)) for name, each in CASES.items()]


def _tried(case: Published, seconds: float) -> Sequence[Finding]:
    step = stored(case.job(), case.base)
    tried = [simulated(step, case.topology, name, each) for name, each in case.plans.items()]
    fits = [each for each in tried if isinstance(each, Hand) and _has_room(each, case)]
    others = [
        f"{each.name}: {each.memory / 1e9:.1f} GB" if isinstance(each, Hand) else each
        for each in tried
        if each not in fits
    ]
    made = searched(step, case.topology, seconds=seconds, fixed=case.base, memory_limit=case.limit)
    if isinstance(made, str):
        told = f"no strategy: {made}"
        return [Finding(case.what, "found, or beaten", told, False, "; ".join(others))]
    found, told = made.result, str(made)
    fits.sort(key=lambda each: each.seconds)
    if not fits:
        told += "; none of the published plans fits"
        return [Finding(case.what, "found, or beaten", told, None, "; ".join(others))]
    ratio = fits[0].seconds / found.seconds
    word = "found" if abs(ratio - 1) < 1e-3 else "beaten" if ratio > 1 else "missed"
    beside = "; ".join(f"{each.name} {seconds_text(each.seconds)}" for each in fits[:4])
    figures = {
        "ratio": ratio,
        "found": found.seconds,
        "search_seconds": made.took,
        "published": {each.name: each.seconds for each in fits},
    }
    return [
        Finding(
            case.what,
            "found, or beaten",
            f"{word}, {ratio:.3f}x: {told} ({beside})",
            ratio >= 1 - 1e-3,
            "; ".join([*others[:3], f"{len(found.tried)} planned"]),
            figures,
        )
    ]


def _has_room(hand: Hand, case: Published) -> bool:
    """True where a plan fits the device and the limit."""
    return hand.fits and (case.limit is None or hand.memory <= case.limit)
