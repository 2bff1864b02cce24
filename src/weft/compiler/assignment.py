"""Assignment: what deduction decides, the layout of every value and of every operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from weft.layout import Layout


@final
@dataclass(frozen=True)
class Assignment:
    """The layouts of a logical graph.

    Attributes:
        values: the layout in which each value is produced, by its name.
        operands: for node number `i` of the graph, the layouts in which it reads its operands: one
            for each distinct value, in the order of first appearance (as `node_uses` names them).
            Inputs have no entry.
        shared: for a value with several readers, the layout to which it is boxed once for all of
            them; each reader takes it from there. Only values whose shared layout differs from the
            produced one have an entry.
        cost: the deduction's cost of all work and boxing in bytes,
            with the charges for departing from the strategy's intent along the last axis.
        bound: a lower bound on the cost of any layouts, along the axis solved last with the others fixed.
        proven: true if `cost` is the least there is, along each axis with the others fixed.
        broken: how often a parameter is used in another layout than the user's, because its op allows no other.
    """

    values: Mapping[str, Layout]
    operands: Mapping[int, tuple[Layout, ...]]
    shared: Mapping[str, Layout] = field(default_factory=dict)
    cost: float = 0.0
    bound: float = 0.0
    proven: bool = True
    broken: int = 0
