"""Parameters that join parts and whose split, as hints ask for it, is none of the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import final

from weft.compiler.context import Stages
from weft.compiler.graph.joined.blocks import SharedDims
from weft.compiler.graph.joined.dims import JoinedDim, joined_dim
from weft.compiler.hints import Hints
from weft.ir.logical import Input, LogicalGraph
from weft.layout import Shares, Split


def unfit_dims(graph: LogicalGraph, hints: Mapping[int, Hints], stages: Stages) -> SharedDims:
    """The shares in which parameters fit their splits, and the dimensions that are so; each dimension once."""
    search = _UnfitSearch(graph, hints, stages)
    return [each for node in graph.of_kind(Input) for each in search.of(node)]


@final
@dataclass(frozen=True)
class _UnfitSearch:
    """Looks for parameters whose split is none of the parts.

    Attributes:
        seen: values whose dimension was followed already.
    """

    graph: LogicalGraph
    hints: Mapping[int, Hints]
    stages: Stages
    seen: set[tuple[str, int]] = field(default_factory=set)

    def of(self, node: Input) -> Iterator[tuple[Shares, JoinedDim]]:
        """The dimensions of a variable that were not followed yet."""
        splits = self._splits(node) if node.role == "parameter" else {}
        for dim, ranks in splits.items():
            if (node.value.name, dim) in self.seen:
                continue
            joined = joined_dim(self.graph, node.value.name, dim)
            if joined is None:
                continue
            self.seen.update(joined.dims.items())
            if self._fits(joined, ranks):
                yield Shares(dim, joined.parts, ranks), joined

    def _splits(self, node: Input) -> dict[int, int]:
        """Over how many ranks hints split each dimension."""
        placement = self.stages.placements[self.stages.homes.get(node.key, 0)]
        sbps = self.hints[placement.axes].inputs.get(node.key, ())
        dims = dict.fromkeys(sbp.dim for sbp in sbps if isinstance(sbp, Split))
        return {
            dim: prod(
                ranks for ranks, sbp in zip(placement.shape, sbps, strict=True) if sbp == Split(dim)
            )
            for dim in dims
        }

    def _fits(self, joined: JoinedDim, ranks: int) -> bool:
        """True where there are several parts, which the ranks divide, and no variable is split otherwise."""
        splits = (
            self._splits(node).get(joined.dims[node.value.name], ranks)
            for node in self.graph.of_kind(Input)
            if node.value.name in joined.dims
        )
        return (
            ranks > 1
            and len(joined.parts) > 1
            and all(part % ranks == 0 for part in joined.parts)
            and all(other == ranks for other in splits)
        )
