"""What an op on eager global tensors costs, beside DTensor and plain torch: a chain of 30 small ops.

    OMP_NUM_THREADS=1 python -m benchmarks.eager_overhead

One process, a placement (and a mesh) of one rank, so that nothing but the ops' overhead is seen; decisions are cached
after the first call. Without gradients, with them, and forward and backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import weft
from benchmarks.measure import Step, compare, interleave, save

OPS = 30


def chain(x: Tensor) -> Tensor:
    for _ in range(OPS // 3):
        x = torch.relu(x * 0.75)
        x = x + x
    return x


def inference(x: Tensor) -> Step:
    def step() -> Tensor:
        with torch.no_grad():
            return chain(x)

    return step


def recorded(x: Tensor) -> Step:
    leaf = x.detach().requires_grad_()
    return lambda: chain(leaf)


def trained(x: Tensor) -> Step:
    leaf = x.detach().requires_grad_()

    def step() -> None:
        leaf.grad = None
        chain(leaf).sum().backward()

    return step


CASES: dict[str, Callable[[Tensor], Step]] = {
    "no_grad": inference,
    "forward": recorded,
    "forward_backward": trained,
}


def start_alone() -> None:
    """A job of one process, as torchrun would start it."""
    tcp: Any = dist
    store = tcp.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def main() -> None:
    """Time all sides and check that they computed the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    start_alone()
    whole = torch.randn(8, 8)
    theirs: Any = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    ours: Any = weft.tensor(whole, placement=weft.placement("cpu", [0]), sbp=weft.split(0))
    made: Any = chain(ours), chain(theirs)
    assert torch.equal(made[0].full(), chain(whole))
    assert torch.equal(made[1].full_tensor(), chain(whole))
    result = {}
    for name, case in CASES.items():
        sides = {"weft": case(ours), "dtensor": case(theirs), "plain": case(whole)}
        seconds = interleave(sides, arguments.rounds, arguments.steps)
        found = compare(seconds, "weft", "dtensor")
        per_op = {side: statistics.median(times) / OPS for side, times in seconds.items()}
        result[name] = found | {f"{side}_us_per_op": time * 1e6 for side, time in per_op.items()}
    save("eager_overhead", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
