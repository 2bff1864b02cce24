"""What a plan says: bytes by kind, work, memory and exchanges of one rank, counted in its local program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from weft.boxing import EXCHANGES, steps
from weft.compiler.pipeline import Compiled
from weft.errors import RuleError
from weft.ir.logical import Box
from weft.ir.plan import (
    Collective,
    Communicate,
    Exchange,
    LocalCall,
    LocalNode,
    LocalProgram,
    RankPlan,
    Transfer,
)
from weft.layout import region_size
from weft.ops import OpCall, flops, traffic
from weft.units import ITEM_SIZE


@dataclass(frozen=True)
class Planned:
    """What one rank does in a step; of a pipeline, one rank of each stage together, but the peak is the highest.

    Attributes:
        sent: bytes that the rank sends, by kind of exchange.
        work: floating-point operations of matrix products.
        parameters, states: bytes at the peak.
        peak: the most bytes that a rank holds.
        exchanges: acts of communicators.
        memory: the peak by kind.
        causes: bytes by kind and cause, largest first: what asked for boxing.
    """

    sent: Mapping[str, float]
    work: float
    parameters: float
    states: float
    peak: float
    exchanges: int
    memory: Mapping[str, int]
    causes: tuple[tuple[str, float], ...] = ()

    @property
    def bytes(self) -> float:
        """Over all kinds."""
        return sum(self.sent.values())


def planned(compiled: Compiled) -> Planned:
    """The figures of the ranks that a plan was made for, together."""
    groups = {each.id: each.ranks for each in compiled.plan.communicators}
    sent: dict[str, float] = defaultdict(float)
    for program in compiled.programs:
        for exchange, size in sent_by(program, groups).items():
            sent[exchange] += size
    peaks = [peak.memory for peak in compiled.peaks]
    highest = max(peaks, key=lambda memory: memory.peak)
    return Planned(
        dict(sent),
        sum(map(work, compiled.programs)),
        sum(memory.parameters for memory in peaks),
        sum(memory.states for memory in peaks),
        highest.peak,
        sum(map(exchanges, compiled.plan.ranks)),
        {name: getattr(highest, name) for name in highest.__slots__},
        causes(compiled),
    )


def sent_by(program: LocalProgram, groups: Mapping[int, tuple[int, ...]]) -> dict[str, float]:
    """Bytes that a rank sends in a step, by kind of exchange.

    Args:
        program: of the rank.
        groups: the ranks of each communicator.
    """
    found: dict[str, float] = defaultdict(float)
    for node in program.nodes:
        if isinstance(node, Collective | Transfer):
            found[node.kind] += exchanged(node, program.rank, groups) * times(node, program)
    return found


def exchanged(node: Exchange, rank: int, groups: Mapping[int, tuple[int, ...]]) -> float:
    """Bytes that one act sends from this rank: a collective's are even, a transfer's are its own pieces."""
    ranks = groups[node.communicator]
    if isinstance(node, Collective):
        return node.bytes / len(ranks)
    if node.input is None:
        return 0.0
    sent = sum(region_size(region) for peer, region in node.sends if ranks[peer] != rank)
    return sent * ITEM_SIZE[node.input.dtype]


def times(node: LocalNode, program: LocalProgram) -> int:
    """How often a node runs in a step: once, or for each micro-batch."""
    touched = {*node.reads, *(value.name for value in node.makes)}
    return 1 if program.loop.isdisjoint(touched) else program.micro_batches


def work(program: LocalProgram) -> float:
    """Operations of matrix products that a rank runs in a step."""
    known: dict[OpCall, float] = {}
    total = 0.0
    for node in program.nodes:
        if isinstance(node, LocalCall):
            call = node.first
            if call not in known:
                known[call] = products(call)
            total += known[call] * times(node, program)
    return total


def products(call: OpCall) -> float:
    """Operations of a call that are a product's: of two tensors of numbers, more than one for every 4 bytes touched."""
    if sum("float" in spec.dtype for spec in call.operands) < 2:
        return 0.0
    try:
        count = flops(call)
    except RuleError:
        return 0.0
    return count if count > traffic(call) / 4 else 0.0


def exchanges(plan: RankPlan) -> int:
    """Acts of communicators in a step."""
    return sum(actor.acts for actor in plan.actors if isinstance(actor, Communicate))


def causes(compiled: Compiled, most: int = 8) -> tuple[tuple[str, float], ...]:
    """What asked for most of the bytes, over all ranks and by rank on average: kind, op, layouts."""
    graph = compiled.graph
    loop = graph.loop
    ranks = {rank for placement in graph.placements for rank in placement.ranks}
    found: dict[str, float] = defaultdict(float)
    for box in graph.of_kind(Box):
        source = graph.values[box.input.name]
        assert source.layout is not None
        assert box.output.layout is not None
        acts = graph.micro_batches if box.output.name in loop else 1
        for step in steps(source.layout, box.output.layout, source.shape, ITEM_SIZE[source.dtype]):
            if step.kind in EXCHANGES:
                shape = "×".join(map(str, source.shape))
                what = f"{step.kind} of %{source.name} [{shape}] for {box.cause}"
                found[what] += step.bytes * acts / len(ranks)
    return tuple(sorted(found.items(), key=lambda item: -item[1])[:most])
