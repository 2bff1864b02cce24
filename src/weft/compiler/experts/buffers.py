"""The buffers of a mixture of experts: where its rows go, and the calls that send them there and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from weft.compiler.experts.mixtures import Mixture
from weft.ir.logical import Arg, Call, LogicalGraph, Ref, Value
from weft.ops.rules.own.experts import DISPATCH, ROUTES


@final
@dataclass(frozen=True)
class Buffers:
    """Names what is in the buffers, and makes the calls around them; `routes` come before all others.

    Attributes:
        graph: in which the mixture is.
        mixture: with its groups of rows, its blocks of experts, and the capacity of each.
    """

    graph: LogicalGraph
    mixture: Mixture

    @property
    def places(self) -> Value:
        """The places of the rows, in the buffers: [rows], int64."""
        ids = self.mixture.ids
        return Value(f"{ids.name}.places", ids.shape, "int64")

    @property
    def own(self) -> Value:
        """The expert of each row, counted from the first of its block: [rows]."""
        return Value(f"{self.mixture.ids.name}.own", self.mixture.ids.shape, self.mixture.ids.dtype)

    @property
    def experts(self) -> Ref:
        """The experts of the rows that come."""
        return Ref(self.value(self.own).name)

    def value(self, value: Value) -> Value:
        """A value with rows, in the buffers: [blocks, rows of a block, …]."""
        shape = (self.mixture.blocks, self.mixture.rows, *value.shape[1:])
        name = f"{value.name}.sent"
        while name in self.graph.values:  # another mixture sends the same rows elsewhere
            name += ".sent"
        return Value(name, shape, value.dtype)

    def routes(self, like: Call) -> Iterator[Call]:
        """Find the places that rows go to, and the experts of those that come, counted from each block's first."""
        mixture, ids = self.mixture, self.mixture.ids
        args = (Ref(ids.name), mixture.experts, mixture.groups, mixture.blocks, mixture.capacity)
        yield Call(ROUTES, args, (), (self.places,), like.location, like.phase)
        op, counted = "aten.remainder.Scalar", (Ref(ids.name), mixture.experts // mixture.blocks)
        yield Call(op, counted, (), (self.own,), like.location, like.phase)
        yield self.send(like, self.value(self.own), Ref(self.own.name), -1)

    def send(self, like: Call, block: Value, rows: Ref, around: int, each: int = 1) -> Call:
        """Send rows where `like` stands: `each` of them from a token, and `around` where a buffer has none."""
        mixture = self.mixture
        sizes = (mixture.groups, mixture.blocks, mixture.capacity, around, 0, each)
        args = (rows, Ref(self.places.name), *sizes)
        return Call(DISPATCH, args, (), (block,), like.location, like.phase)

    def back(self, block: Value, each: int) -> tuple[Arg, ...]:
        """The arguments of a call that takes rows back: the sums of `each` of them, those of a token."""
        mixture = self.mixture
        places = Ref(self.places.name)
        return (Ref(block.name), places, mixture.groups, mixture.capacity, 0, each)
