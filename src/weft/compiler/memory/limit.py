"""The limit on what a rank may hold, and what to say of a plan that is over it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import final

from weft.compiler.context import Options
from weft.compiler.memory.walk import Held, Peak
from weft.errors import StrategyError
from weft.ir import LocalProgram, LogicalGraph
from weft.ir.logical import Box, Call, Input
from weft.layout import Broadcast
from weft.strategy.parts import Zero
from weft.units import ITEM_SIZE, bytes_text

# How many of the largest values are named.
NAMED = 8


def check_limit(
    peaks: tuple[Peak, ...],
    graph: LogicalGraph,
    programs: Iterable[LocalProgram],
    options: Options,
) -> tuple[Peak, ...]:
    """The peaks, when no rank would hold more than `options.memory_limit`.

    Raises:
        StrategyError: names the rank, the kinds, the largest values with the lines that make them,
            and what would help.
    """
    limit = options.memory_limit
    peak = max(peaks, key=lambda each: each.memory.peak, default=None)
    if limit is None or peak is None or peak.memory.peak <= limit:
        return peaks
    total = peak.memory.peak
    program = next(each for each in programs if each.rank == peak.rank)
    makers = _Makers(graph, program.origins)
    sizes = {each.name: getattr(peak.memory, each.name) for each in fields(peak.memory)}
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in largest if size)
    lines = [
        (
            f"rank {peak.rank} would hold {bytes_text(total)} at its peak, {bytes_text(total - limit)} "
            f"more than memory_limit={limit} ({bytes_text(limit)})"
        ),
        f"  by kind: {kinds}",
        "  the largest values then:",
        *(f"    {makers.described(each)}" for each in peak.held[:NAMED]),
        "  what would help:",
        *(f"    {each}" for each in _remedies(peak, makers, options)),
    ]
    raise StrategyError("\n".join(lines))


@final
@dataclass(frozen=True)
class _Makers:
    """The nodes that made the values of a rank, of which some are forms of others (`LocalProgram.origins`)."""

    graph: LogicalGraph
    origins: Mapping[str, str]

    def of(self, name: str) -> Call | Input | None:
        """The node of the user's program that made a local value, or the value that it is another form of."""
        while name in self.origins:
            name = self.origins[name]
        node = self.graph.producers.get(name)
        if isinstance(node, Box):
            return self.of(node.input.name)
        return node if isinstance(node, (Call, Input)) else None

    def described(self, held: Held) -> str:
        """A value that a rank holds: bytes, name, and what makes it."""
        count = f" ({held.versions} versions)" if held.versions > 1 else ""
        match self.of(held.register):
            case Call(op=op, location=location):
                where = f" by {op}{f' at {location}' if location else ''}"
            case Input(role=role, key=key):
                where = f" from {role} {key}"
            case _:
                where = ""
        return f"{bytes_text(held.bytes)}{count}: {held.register}{where}"


def _remedies(peak: Peak, makers: _Makers, options: Options) -> Iterator[str]:
    """Changes of the strategy, with about how much less each would hold."""
    yield from _of_modules(peak, makers, options)
    memory, number = peak.memory, options.micro_batches
    passing = (memory.activations + memory.communication) // 2
    # The first cut of the batch brings accumulated gradients.
    saved = passing - (memory.parameters if number == 1 else 0)
    if saved > 0:
        yield f"micro_batches={2 * number}: about {bytes_text(saved)} less activations"
    yield from _of_zero(peak, makers.graph, options)
    if memory.parameters:
        held = memory.parameters + memory.states + memory.gradients
        yield (
            "more stages, each on ranks of its own: "
            f"{bytes_text(held)} of parameters, states and gradients are divided among them"
        )
    yield f"a memory_limit of at least {memory.peak}"


def _of_modules(peak: Peak, makers: _Makers, options: Options) -> Iterator[str]:
    saved: dict[str, Counter[str]] = {}
    for held in peak.held:
        node = makers.of(held.register)
        location = node.location if isinstance(node, Call) else None
        if location is not None and location.module and not location.backward:
            # `blocks.0.attention.qkv` as `blocks.0`; without a number, the first part.
            found = re.match(r"(?:[^.]*[^.\d][^.]*\.)*?\d+(?=\.|$)", location.module)
            module = found[0] if found else location.module.partition(".")[0]
            pattern = re.sub(r"\d+$", "*", module)
            saved.setdefault(pattern, Counter())[module] += held.bytes
    for pattern, each in sorted(saved.items(), key=lambda item: -item[1].total())[:2]:
        # One of the repeated modules is whole again while its backward runs.
        less = each.total() - max(each.values())
        if less and pattern not in options.recompute:
            yield f'recompute=["{pattern}"]: up to {bytes_text(less)} less activations'
        if less and pattern not in options.offload:
            yield f'offload=["{pattern}"]: up to {bytes_text(less)} less activations'


def _of_zero(peak: Peak, graph: LogicalGraph, options: Options) -> Iterator[str]:
    """Variables that are whole along an axis of several ranks could be sharded."""
    if isinstance(options.zero, Zero) and options.zero.level == 3:
        return
    for axis in range(max(placement.axes for placement in graph.placements)):
        # Bytes on the rank that shards along the axis would not hold.
        saved = Counter[str]()
        for node in graph.of_kind(Input):
            layout = node.value.layout
            if (
                layout is not None
                and peak.rank in layout.placement.coordinates
                and layout.sbp[axis : axis + 1] == (Broadcast(),)
            ):
                local = layout.local_shape(node.value.shape, peak.rank)
                size, ranks = (
                    ITEM_SIZE[node.value.dtype] * prod(local),
                    layout.placement.shape[axis],
                )
                saved[node.role] += size * (ranks - 1) // ranks
        states, parameters = saved["state"], saved["parameter"]
        if states and options.zero is None:
            yield f"zero=weft.Zero(level=1, axis={axis}): {bytes_text(states)} less states"
        if parameters:
            yield (
                f"zero=weft.Zero(level=3, axis={axis}): up to {bytes_text(states + parameters)} "
                "less parameters and states"
            )
