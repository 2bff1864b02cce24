"""Calls in the turns of the parts of a batch: between two exchanges every part has its turn, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from weft.ir.plan import LocalNode, LocalUpdate


@final
@dataclass
class Turns:
    """Nodes in an order in which they may run.

    Attributes:
        parts: how many there are.
        nodes: what is done, in order.
        turns: for each part, what runs in its turn before the next exchange.
        late: what waits for the turns of all parts.
        late_values: what it makes.
        updates: written last, when all parts have read the variables.
    """

    parts: int
    nodes: list[LocalNode] = field(default_factory=list)
    turns: list[list[LocalNode]] = field(init=False)
    late: list[LocalNode] = field(default_factory=list)
    late_values: set[str] = field(default_factory=set)
    updates: list[LocalUpdate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = [[] for _ in range(self.parts)]

    def add_whole(self, node: LocalNode) -> None:
        """Add a node that runs once: now, or behind what it waits for."""
        if isinstance(node, LocalUpdate):
            self.updates.append(node)
        elif node.reads & self.late_values:
            self.add_late(node)
        else:
            self.nodes.append(node)

    def add_late(self, node: LocalNode) -> None:
        """Add a node that runs when all parts had their turns."""
        self.late.append(node)
        self.late_values.update(value.name for value in node.makes)

    def take(self) -> None:
        """Let all parts have their turns, and then what waits for them."""
        for turn in self.turns:
            self.nodes += turn
            turn.clear()
        self.nodes += self.late
        self.late.clear()
        self.late_values.clear()

    def finished(self) -> tuple[LocalNode, ...]:
        """Everything."""
        self.take()
        return (*self.nodes, *self.updates)
