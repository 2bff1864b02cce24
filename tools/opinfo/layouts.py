"""In which layouts the inputs of a sample are tried, sums among them, and the tensors of each rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.ir.logical import Call, Input, LogicalGraph, Value
from weft.ir.nodes import HINT, Hint
from weft.ir.nodes import renamed as renamed_node
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split

B = Broadcast()
GRIDS = ((4,), (2, 2), (1, 4))
Layouts = Mapping[str, tuple[SBP, ...]]


@dataclass(frozen=True)
class Trial:
    """A grid, and one SBP for each of its axes for every input by key."""

    grid: tuple[int, ...]
    layouts: Layouts

    def __str__(self) -> str:
        parts = (
            f"{key}: ({', '.join(map(str, sbp))})"
            for key, sbp in self.layouts.items()
            if any(one != B for one in sbp)
        )
        return f"{self.grid} {', '.join(parts)}"


def trials(inputs: Mapping[str, Tensor], limit: int, seed: str) -> list[Trial]:
    """Layouts to try: on one axis every split and sum of every input, then some pairs on two axes.

    Args:
        inputs: tensors by key.
        limit: how many, over all grids; which ones is drawn from `seed`.
    """
    draw = random.Random(seed)
    single = [one for one in _single(inputs) if one]
    draw.shuffle(single)
    most = max(limit - 3, 1)
    chosen = [_trial((4,), [one], inputs) for one in [*_joint(inputs), *single][:most]]
    pairs = single or [{}]
    for grid in ((2, 2), (2, 2), (1, 4)):
        chosen.append(_trial(grid, [draw.choice(pairs), draw.choice(pairs)], inputs))
    return list({str(trial): trial for trial in chosen}.values())


def _single(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, SBP]]:
    """One input split or Partial, the others whole."""
    for key, tensor in inputs.items():
        for dim in range(tensor.dim()):
            yield {key: Split(dim)}
        if tensor.is_floating_point():
            yield {key: Partial()}


def _joint(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, SBP]]:
    """All inputs split along their first dimension."""
    found: dict[str, SBP] = {key: Split(0) for key, tensor in inputs.items() if tensor.dim()}
    if len(found) > 1:
        yield found


def _trial(
    grid: tuple[int, ...], axes: list[dict[str, SBP]], inputs: Mapping[str, Tensor]
) -> Trial:
    return Trial(grid, {key: tuple(axis.get(key, B) for axis in axes) for key in inputs})


def placement_of(grid: tuple[int, ...]) -> Placement:
    """Ranks 0, 1, … on a grid."""
    count = 1
    for size in grid:
        count *= size
    return Placement("cpu", grid, tuple(range(count)))


def local_tensors(tensor: Tensor, layout: Layout, seed: int) -> list[Tensor]:
    """What each rank holds of `tensor`; a Partial one is scattered over the ranks element by element.

    Each element lies on one rank of the axis and is 0 on the others: their sum is exact, so that ops with steps
    (floor, argmax) see the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = [
        torch.randint(parts, tensor.shape, generator=generator) for parts in layout.placement.shape
    ]
    return [_local(tensor, layout, rank, owners) for rank in layout.placement.ranks]


def _local(tensor: Tensor, layout: Layout, rank: int, owners: list[Tensor]) -> Tensor:
    for axis, sbp in enumerate(layout.sbp):
        if isinstance(sbp, Partial) and layout.placement.shape[axis] > 1:
            mine = owners[axis] == layout.placement.coordinates[rank][axis]
            tensor = torch.where(mine, tensor, torch.zeros_like(tensor))
    ranges = layout.local_ranges(tuple(tensor.shape), rank)
    for dim, (offset, length) in enumerate(ranges):
        tensor = tensor.narrow(dim, offset, length)
    return tensor.clone(memory_format=torch.contiguous_format)


def with_partials(graph: LogicalGraph, laid: Mapping[str, Layout]) -> LogicalGraph:
    """The graph with a hint behind every input that is Partial, so that deduction carries the sum on."""
    nodes: list[Any] = []
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(node, Input):
            nodes.append(node)
            continue
        if nodes and isinstance(nodes[-1], Input):
            for given in graph.of_kind(Input):
                hint = _hint(given, laid.get(given.key))
                if hint is not None and hint.outputs[0] is not None:
                    renamed[given.value.name] = hint.outputs[0].name
                    nodes.append(hint)
        nodes.append(renamed_node(node, renamed))
    return LogicalGraph(graph.name, tuple(nodes)) if renamed else graph


def _hint(node: Input, layout: Layout | None) -> Call | None:
    if layout is None or not any(isinstance(sbp, Partial) for sbp in layout.sbp):
        return None
    value = Value(f"{node.value.name}.hinted", node.value.shape, node.value.dtype)
    return Call.of(HINT, (node.value.ref,), (value,), hint=Hint(layout.sbp))
