"""A program in two lines: model, optimizer, placement; and the way its work is shared out, as it was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.compiler.microbatch.prepare import cut_leaves
from weft.compiler.options import Options
from weft.compiler.pipeline import Compiled
from weft.ir.logical import Box, Call, Input, LogicalGraph, Update, Value
from weft.layout import Placement, Split
from weft.strategy.parts import Zero
from weft.strategy.sharding import highest_level, level_of, zero_rules

# Ranks that a title names; of more it says how many there are.
_NAMED = 16


def title(graph: LogicalGraph) -> str:
    """The model, how it is trained, and where."""
    rules = dict.fromkeys(each.rule for each in graph.of_kind(Update) if each.rule != "copy")
    kind = f"training step by {', '.join(rules)}" if rules else "evaluation"
    return f"{graph.name}, {kind} on {_where(graph)}"


def _where(graph: LogicalGraph) -> str:
    """The grid of the ranks, where there is one and it is small; else the ranks, and how many stages they make."""
    ranks = sorted({rank for each in graph.placements for rank in each.ranks})
    if len(graph.placements) == 1 and len(ranks) <= _NAMED:
        return str(graph.placements[0])
    devices = ", ".join(dict.fromkeys(each.device_type for each in graph.placements))
    named = str(ranks) if len(ranks) <= _NAMED else f"{len(ranks)} ranks"
    stages = len({call.phase.stage for call in graph.of_kind(Call)})
    return f"{devices} {named}" + (f" in {stages} stages" if stages > 1 else "")


def strategy_words(compiled: Compiled, options: Options) -> str:
    """The way the step is shared out, read off its layouts; options where layouts do not tell."""
    graph, stages = compiled.graph, len(compiled.stages.placements)
    words = [*_batch(graph), *_parameters(compiled), *_zero(compiled, options)]
    if stages > 1:
        parts = f" × {graph.micro_batches} micro-batches" if graph.micro_batches > 1 else ""
        words.append(f"{stages} stages{parts}")
        words.append(f"schedule {compiled.schedule.name}")
        if options.in_flight is not None:
            words.append(f"in flight {', '.join(map(str, options.in_flight))}")
    elif graph.micro_batches > 1:
        words.append(f"{graph.micro_batches} micro-batches")
    if options.precision is not None:
        content = options.precision.content()
        words.append(" ".join(("precision", *(f"{name} {told}" for name, told in content.items()))))
    if any(each.rule != "copy" for each in graph.of_kind(Update)):
        for name in ("recompute", "offload"):
            if getattr(options, name):
                words.append(f"{name} {', '.join(getattr(options, name))}")
        if options.clip_norm is not None:
            words.append(f"gradients clipped to norm {options.clip_norm:g}")
    return ", ".join(words) or "all ranks compute the same"


def _batch(graph: LogicalGraph) -> Iterator[str]:
    """Along which axes and dimensions leaves of the batch are split."""
    cut = cut_leaves(graph)
    found: dict[tuple[int, int, int], None] = {}
    for node in graph.of_kind(Input):
        if node.role == "batch":
            # A leaf in micro-batches has one dimension more.
            before = 1 if node.value.name in cut else 0
            splits = _splits(node.value)
            found.update(((axis, ranks, dim - before), None) for axis, ranks, dim in splits)
    for axis, ranks, dim in found:
        where = f"axis {axis} ({ranks} ranks)"
        yield (
            f"data parallel over {where}"
            if dim == 0
            else f"dimension {dim} of the batch over {where}"
        )


def _parameters(compiled: Compiled) -> Iterator[str]:
    """Along which axes how many parameters are used in shards, also such as lie whole."""
    graph = compiled.graph
    nodes = [node for node in graph.of_kind(Input) if node.role == "parameter"]
    split = Counter[tuple[int, int]]()
    for node in nodes:
        boxed = (each.output for each in graph.users[node.value.name] if isinstance(each, Box))
        found = {part[:2] for value in (node.value, *boxed) for part in _splits(value)}
        split.update(each for each in found if compiled.stored.get(node.key) != each[0])
    for (axis, ranks), number in split.items():
        yield f"{number} of {len(nodes)} parameters split over axis {axis} ({ranks} ranks)"


def _zero(compiled: Compiled, options: Options) -> Iterator[str]:
    axes = ", ".join(map(str, dict.fromkeys(compiled.stored.values())))
    if options.zero is not None and not axes:
        yield f"ZeRO {highest_level(options.zero)}, which shards nothing here"
    elif axes:
        level = _levels(compiled, options) if options.zero else "parameters kept in shards"
        yield f"{level} over axis {axes}"


def _levels(compiled: Compiled, options: Options) -> str:
    """The level; where parameters differ in it, the levels and of how many parameters each is."""
    if isinstance(options.zero, Zero):
        return f"ZeRO {options.zero.level}"
    rules = zero_rules(options.zero)
    keys = [node.key for node in compiled.graph.of_kind(Input) if node.role == "parameter"]
    found = Counter(level_of(rules, key) for key in keys if key in compiled.stored)
    each = [f"{level} for {found[level]}" for level in sorted(found)]
    return f"ZeRO {', '.join(each)} of {len(keys)} parameters"


def _splits(value: Value) -> Iterator[tuple[int, int, int]]:
    """Axis, its ranks and the dimension, where a value is split over several ranks."""
    layout = value.layout
    assert layout is not None  # all values of a compiled graph have one
    placement: Placement = layout.placement
    for axis, sbp in enumerate(layout.sbp):
        if isinstance(sbp, Split) and placement.shape[axis] > 1:
            yield axis, placement.shape[axis], sbp.dim
