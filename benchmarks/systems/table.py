"""Which systems train by which strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.systems import ddp, dtensor, fsdp, limits, own, pipelining, plain
from benchmarks.systems.system import Job, System


@dataclass(frozen=True)
class Entry:
    """A system of the table.

    Attributes:
        name: as results call it.
        build: makes it; every rank calls it with its job.
        kind: weft itself, a peer, or a limit, which has no losses to compare.
        by_rank: whether each rank has its own batch statistics (BatchNorm).
    """

    name: str
    build: Callable[[Job], System]
    kind: Literal["own", "peer", "limit"]
    by_rank: bool = False


LIMITS = [
    Entry("limit", limits.eager, "limit"),
    Entry("limit compiled", limits.compiled, "limit"),
    Entry("limit weft", limits.aten, "limit"),
    Entry("limit weft auto", limits.auto, "limit"),
]
OWN = [
    Entry("weft", own.aten, "own"),
    Entry("weft auto", own.auto, "own"),
    Entry("weft torch kernels", own.torch_kernels, "own"),
    Entry("weft over gloo", own.gloo, "own"),
]
# On one rank there is no transport.
OWN_ALONE = [each for each in OWN if each.name != "weft over gloo"]
DDP = [
    Entry("ddp", ddp.eager, "peer", by_rank=True),
    Entry("ddp compiled", ddp.compiled, "peer", by_rank=True),
    Entry("ddp synced", ddp.with_synced_norms, "peer"),
]
FSDP = [
    Entry("fsdp2", fsdp.eager, "peer", by_rank=True),
    Entry("fsdp2 compiled", fsdp.compiled, "peer", by_rank=True),
]
DTENSOR = [
    Entry("dtensor", dtensor.eager, "peer"),
    Entry("dtensor compiled", dtensor.compiled, "peer"),
    Entry("dtensor tuned", dtensor.tuned, "peer"),
    Entry("dtensor tuned compiled", dtensor.tuned_compiled, "peer"),
]
PIPELINING = [
    Entry("torch 1f1b", pipelining.one_forward_one_backward, "peer"),
    Entry("torch 1f1b compiled", pipelining.one_forward_one_backward_compiled, "peer"),
    Entry("torch interleaved", pipelining.interleaved, "peer"),
    Entry("torch zero bubble", pipelining.zero_bubble, "peer"),
    Entry("torch zbv", pipelining.zbv, "peer"),
]
PLAIN = [Entry("eager", plain.eager, "peer"), Entry("torch.compile", plain.compiled, "peer")]

SYSTEMS: dict[str, list[Entry]] = {
    "single": [*PLAIN, *OWN_ALONE],
    "data_parallel": [*LIMITS, *DDP, *OWN],
    "zero3": [*LIMITS, *FSDP, *OWN],
    "tensor_parallel": [*LIMITS, *DTENSOR, *OWN],
    "pipeline": [*LIMITS, *PIPELINING, *OWN],
    "split": [*DDP, *FSDP, *DTENSOR, *OWN],
    "expert": [*DDP, *FSDP, *OWN],
}
