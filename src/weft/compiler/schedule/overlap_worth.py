"""Estimate if a step is worth running in parts of its batch: its time on two queues, with and without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from weft.compiler.local.overlap import batch_leaves, in_parts
from weft.compiler.options import Options
from weft.compiler.schedule.bucket import Bucket, Schedule, bucket
from weft.hardware.durations import Durations
from weft.ir.logical import LogicalGraph
from weft.ir.plan import Collective, LocalCall, LocalProgram, LocalUpdate
from weft.units import Bytes, Seconds, seconds_text

# So many parts are tried. Four hid more of a GPT's exchanges over 1 Gbit/s, but slowed down its
# products by as much: messages cost time of the same cores.
PARTS = 2
# A step must become so much shorter, and this much of it must be exchanged between calls.
WORTH = 0.95
NONE = Seconds(0.0)


@final
@dataclass(frozen=True)
class BatchCut:
    """Into how many parts the batch is cut, and the estimated seconds of a step in one part and in these.

    `weighed` says whether that was estimated, and is not because the batch may not be cut.
    """

    parts: int = 1
    whole: Seconds = NONE
    cut: Seconds = NONE
    weighed: bool = field(default=False, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for `explain`."""
        if self.parts == 1:
            return ()
        seconds = f"{seconds_text(self.cut)} instead of {self.whole * 1e3:.3g}"
        return (
            f"the batch in {self.parts} parts, whose exchanges overlap with products: {seconds}",
        )


def may_cut(graph: LogicalGraph, options: Options) -> bool:
    """True where the batch of a step may be cut: the step is not yet in parts otherwise, and all ranks are alike.

    Where all shards of a tensor have one shape, rules allow the same cuts on all ranks.
    """
    if graph.micro_batches > 1 or len(graph.placements) > 1 or options.offload:
        return False
    return all(value.is_even for value in graph.values.values())


def best_cut(program: LocalProgram, durations: Durations, bucket_bytes: Bytes) -> BatchCut:
    """Into how many parts the batch is best cut: one or two.

    Args:
        program: of one rank.
        durations: of what the ranks compute and exchange.
        bucket_bytes: the size from which a bucket starts.
    """
    clock = _RankEstimates(program, durations, bucket_bytes)
    exchanged = clock.exchanged()
    whole = clock.step(program) if exchanged else NONE
    if exchanged <= (1 - WORTH) * whole or not batch_leaves(program, PARTS):
        return BatchCut(weighed=exchanged <= (1 - WORTH) * whole)
    cut = clock.step(in_parts(program, PARTS))
    return BatchCut(PARTS, whole, cut, True) if cut < WORTH * whole else BatchCut(weighed=True)


@final
class _RankEstimates:
    """Estimates of one rank; its peers keep pace with it."""

    def __init__(self, program: LocalProgram, durations: Durations, bucket_bytes: Bytes) -> None:
        self._program = program
        self._durations = durations
        self._bucket_bytes = bucket_bytes

    def exchanged(self) -> Seconds:
        """Seconds of what calls wait for: gradients that only updates read are reduced beside the backward."""
        read = {
            name
            for node in self._program.nodes
            if isinstance(node, LocalCall)
            for name in node.reads
        }
        waited = (
            self._durations.exchange([node], self._program.rank)
            for node in self._program.nodes
            if isinstance(node, Collective) and node.output.name in read
        )
        return Seconds(sum(waited))

    def step(self, program: LocalProgram) -> Seconds:
        """Seconds of a step in which each queue does one thing after another, in order."""
        values, there, free = program.values, dict[str, float](), dict[str, float]()
        for item in self._schedule(program):
            queue, seconds = "compute", 0.0
            if isinstance(item, Bucket):
                queue = str(item.collectives[0].communicator)
                seconds = self._durations.exchange(item.collectives, program.rank)
            else:
                seconds = self._durations.node(item, values, program.rank)
            start = max(there.get(name, 0.0) for name in (*item.reads, "")) if item.reads else 0.0
            end = max(start, free.get(queue, 0.0)) + seconds
            free[queue] = end
            there.update((value.name, end) for value in item.makes)
        return Seconds(max(free.values(), default=0.0))

    def _schedule(self, program: LocalProgram) -> Schedule:
        items = bucket(program, self._bucket_bytes)
        work = [item for item in items if not isinstance(item, LocalUpdate)]
        return (*work, *(item for item in items if isinstance(item, LocalUpdate)))
