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
        cost: what the deduction's cost model says of all work and boxing together, in bytes; of
            what it charges for departing from the intent of a strategy, the part along the last
            axis.
        bound: the least that deduction knows any layouts to cost, along the axis solved last with the
            others as they are.
        proven: true where `cost` is the least there is, along each axis with the others as they are.
        broken: how often a parameter is used differently from the user laid it out, because its op
            admits nothing else.
    """

    values: Mapping[str, Layout]
    operands: Mapping[int, tuple[Layout, ...]]
    shared: Mapping[str, Layout] = field(default_factory=dict)
    cost: float = 0.0
    bound: float = 0.0
    proven: bool = True
    broken: int = 0
