"""What the first run on a GPU has to answer: `python -m benchmarks.cuda_check`, or under `weft run -n N`.

Each check prints a line; the exit status is 1 when one fails. What is only worth knowing, such as
how far measured memory lies from the plan's, is printed without a verdict.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import weft
from weft.runtime.devices.cuda_graphs import VARIABLE, CudaGraphCapture

WIDTH, BATCH, STEPS = 256, 16, 8


def model() -> nn.Module:
    """Layers with dropout, norm and many short kernels."""
    torch.manual_seed(0)
    block = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(6) for layer in block))


def loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return network(batch["x"]).square().mean()


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))}


@contextmanager
def graphs(mode: str) -> Iterator[None]:
    os.environ[VARIABLE] = mode
    yield
    del os.environ[VARIABLE]


def program(mode: str, strategy: weft.Strategy) -> weft.Program:
    network = model().cuda()
    ranks = list(range(int(os.environ.get("WORLD_SIZE", "1"))))
    with graphs(mode):
        return weft.compile(
            network,
            loss,
            torch.optim.AdamW(network.parameters(), lr=1e-3),
            batch(0),
            placement=weft.placement("cuda", ranks),
            strategy=strategy,
            seed=1,
        )


def losses(mode: str, strategy: weft.Strategy) -> list[float]:
    one = program(mode, strategy)
    found = [one.step(batch(seed)) for seed in range(STEPS)]
    return [float(each) for each in found]


def same_with_graphs(strategy: weft.Strategy) -> str:
    """Replayed steps give the losses of launched ones, dropout included."""
    launched, replayed = losses("never", strategy), losses("always", strategy)
    furthest = max(abs(a - b) for a, b in zip(launched, replayed, strict=True))
    assert furthest <= 1e-5 * launched[0], f"launched {launched}, replayed {replayed}"
    return f"{STEPS} losses, {furthest:.1e} apart at most"


def loaded_ahead() -> str:
    """Batches that a thread copies to the device, on a stream of its own, are those that steps copy themselves."""
    strategy = weft.data_parallel()
    there = losses("never", strategy)
    one = program("never", strategy)
    ahead = [float(each) for each in one.run(batch(seed) for seed in range(STEPS))]
    furthest = max(abs(a - b) for a, b in zip(there, ahead, strict=True))
    assert furthest <= 1e-5 * there[0], f"copied by steps {there}, ahead of them {ahead}"
    return f"{STEPS} losses, {furthest:.1e} apart at most"


def all_replayed() -> str:
    """Nothing in a plain model makes the host wait."""
    one = program("always", weft.data_parallel())
    for seed in range(4):
        one.step(batch(seed))
    text = one.explain(details=True)
    assert "the host waits" not in text, text
    return text.strip().splitlines()[-1]


def unheld_memory() -> str:
    """A tensor by its address: the same elements, of every dtype and any strides."""
    tape = CudaGraphCapture(torch.device("cuda", torch.cuda.current_device()))
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
        base = torch.randn(6, 8, device="cuda").to(dtype)
        for each in (base, base.t(), base[1:, ::2], base[0, 0]):
            again = tape.unheld(each)
            assert torch.equal(again, each)
            assert again.data_ptr() == each.data_ptr()
    before = torch.cuda.memory_allocated()
    again = tape.unheld(torch.empty(1 << 20, device="cuda"))
    assert torch.cuda.memory_allocated() == before, "the memory is held"
    return "5 dtypes, 4 layouts"


def skipped_updates() -> str:
    """fp16: after the first update the host does not wait for the flag."""
    one = program("never", weft.Strategy(batch={"*": weft.split(0)}, precision="fp16"))
    for seed in range(6):
        one.step(batch(seed))
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.step(batch(7))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no wait in a step"


def step_seconds() -> str:
    """Only worth knowing: what graphs save, and whether the host runs ahead."""
    lines = []
    for mode in ("never", "always"):
        one = program(mode, weft.data_parallel())
        for seed in range(4):
            one.step(batch(seed))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for seed in range(50):
            one.step(batch(seed))
        ahead = time.perf_counter() - begun
        torch.cuda.synchronize()
        whole = time.perf_counter() - begun
        lines.append(f"{mode}: host {ahead * 20:.2f} ms, step {whole * 20:.2f} ms")
    return "; ".join(lines)


def memory() -> str:
    """Only worth knowing: the plan's peak beside the allocator's."""
    one = program("never", weft.data_parallel())
    one.step(batch(0))
    torch.cuda.reset_peak_memory_stats()
    one.step(batch(1))
    (found,) = one.memory()
    peak = torch.cuda.max_memory_allocated()
    return f"plan {found.predicted.peak}, measured {found.measured}, allocator {peak} bytes"


def traced() -> str:
    """Times of the device: every act ends after it begins, and the step takes what the host sees."""
    one = program("never", weft.data_parallel())
    for seed in range(3):
        one.step(batch(seed))
    (rank, *_) = one.trace()
    assert all(each.begin <= each.end for each in rank.slices)
    return f"{len(rank.slices)} slices"


CHECKS: dict[str, Callable[[], str]] = {
    "a tensor by its address": unheld_memory,
    "graphs, data parallel": lambda: same_with_graphs(weft.data_parallel()),
    "graphs, micro-batches": lambda: same_with_graphs(
        weft.Strategy(batch={"*": weft.split(0)}, micro_batches=4)
    ),
    "graphs, ZeRO 3": lambda: same_with_graphs(
        weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(level=3))
    ),
    "batches loaded ahead": loaded_ahead,
    "all segments replayed": all_replayed,
    "fp16 without waiting": skipped_updates,
    "trace": traced,
    "memory": memory,
    "seconds": step_seconds,
}


def outcome(check: Callable[[], Any]) -> tuple[bool, str]:
    try:
        return True, check()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def main() -> int:
    if not torch.cuda.is_available():
        print("this torch sees no CUDA device")
        return 1
    failed = 0
    for name, check in CHECKS.items():
        good, text = outcome(check)
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {name}: {text}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
