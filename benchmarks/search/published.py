"""Plans that others have published, simulated, and what a search finds for the same step and machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import weft
from benchmarks.models import HALF, LLAMA_8B, Decoder, gpt, llama, mlp, wide_resnet
from benchmarks.search.hands import GPT_SHAPE, LLAMA_SHAPE, Beside
from benchmarks.search.trial import Trial

S, B = weft.split(0), weft.broadcast
FP16 = weft.Strategy(precision="fp16")
# Alpa's GPTs (arXiv 2201.12023, table 5), Galvatron's BERT-Huge-32 (arXiv 2211.13878, table 1) as a decoder.
GPT_1_3B = Decoder(24, 2048, 32, 1024, 51200)
GPT_6_7B = Decoder(32, 4096, 32, 1024, 51200)
HUGE_32 = Decoder(32, 1280, 16, 512, 30522)


def _published(
    what: str,
    job: Callable[[], weft.Job],
    topology: str,
    plans: Mapping[str, weft.Strategy],
    base: weft.Strategy = HALF,
    limit: int | None = None,
) -> Beside:
    return Beside(what, job, topology, plans.items, base, limit)


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


CASES: dict[str, Beside] = {
    "alpa mlp, many samples": _published(
        "Alpa, MLP of 4 layers of 1,024, 65,536 samples, 8 V100",
        *(partial(mlp, 1024, 4, 65536), "p3.16xlargex8"),
        {f"data {8 // t} x columns {t}": _mlp(8 // t, t) for t in (1, 2, 8)},
        base=weft.Strategy(),
    ),
    "alpa mlp, wide": _published(
        "Alpa, MLP of 4 layers of 8,192, 1,024 samples, 8 V100",
        *(partial(mlp, 8192, 4, 1024), "p3.16xlargex8"),
        {f"data {8 // t} x columns {t}": _mlp(8 // t, t) for t in (1, 2, 8)},
        base=weft.Strategy(),
    ),
    "alpa gpt-1.3b": _published(
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
    "alpa gpt-6.7b": _published(
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
    "alpa wide-resnet": _published(
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
    "galvatron": _published(
        "Galvatron, 32 equal layers of 1,280 on 8 devices, 128 sequences",
        *(partial(gpt, HUGE_32, 128), "a100-40gbx8"),
        {
            **{f"data 8, ZeRO 3, {n} layers recomputed": _mixed(n, 3) for n in (0, 8, 16, 24, 32)},
            **{f"data 8, {n} layers recomputed": _mixed(n, 0) for n in (8, 16, 24, 32)},
        },
        limit=12 * 10**9,
    ),
    "autoparallel llama-8b": _published(
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
    return [Trial(f"published/{name}", each.tried) for name, each in CASES.items()]
