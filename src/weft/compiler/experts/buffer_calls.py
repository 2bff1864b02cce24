"""The calls of a mixture of experts that run on rows in buffers, and the values that are sent there.

- The products, and calls on rows alone between them.
- Before them, calls on rows of which one operand alone is wide: it is sent in place of their result.
- Behind them, calls up to where less crosses: the sum of a token's rows, or one number for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import final

from weft.compiler.experts.mixtures import Mixture
from weft.compiler.experts.rows import has_rows, summed, works_on_rows
from weft.ir.logical import Call, LogicalGraph, Node, Value, node_uses
from weft.units import ITEM_SIZE


def calls_in_buffers(graph: LogicalGraph, mixture: Mixture) -> frozenset[int]:
    """The ids of the calls of a mixture that run on rows in its buffers."""
    found = _Found(graph, mixture.ids, {id(call) for call in mixture.calls})
    found.between()
    found.before()
    found.behind()
    return frozenset(found.inside)


@final
@dataclass
class _Found:
    """The calls, by id, that run on rows in buffers.

    Attributes:
        ids: the experts of the rows; before they are known nothing can be sent.
        inside: the products to begin with.
        products: these.
        nodes: behind the experts.
    """

    graph: LogicalGraph
    ids: Value
    inside: set[int]
    products: frozenset[int] = field(init=False)
    nodes: tuple[Node, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.products = frozenset(self.inside)
        maker = self.graph.producers[self.ids.name]
        start = next(i for i, node in enumerate(self.graph.nodes) if node is maker)
        self.nodes = self.graph.nodes[start + 1 :]

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    def between(self) -> None:
        """Calls on rows alone that lead from products to products."""
        below: set[int] = set()
        made: set[str] = set()
        for node in self._calls():
            if id(node) in self.products:
                made.update(self._rows_made(node))
            elif self._alone(node) and made.intersection(self._row_operands(node)):
                below.add(id(node))
                made.update(_names(node))
        self._keep_leading(below, set())

    def before(self) -> None:
        """Calls that are read in the buffers alone, and have as little to send as they make."""
        for node in reversed(self.nodes):
            if isinstance(node, Call) and id(node) not in self.inside and self._alone(node):
                users = [user for name in _names(node) for user in self.graph.users[name]]
                if users and all(id(user) in self.inside for user in users) and self._fits(node):
                    self.inside.add(id(node))

    def _fits(self, node: Call) -> bool:
        wide = [name for name in self._row_operands(node) if self._is_wide(name)]
        sizes = [ITEM_SIZE[self.graph.values[name].dtype] for name in (*wide, *_names(node))]
        return len(wide) == 1 and len(_names(node)) == 1 and sizes[0] <= sizes[1]

    def behind(self) -> None:
        """Calls on what is made in the buffers, or sent there, that end in less than rows of full width."""
        made: set[str] = set()
        for node in self._calls():
            if id(node) in self.inside:
                made.update(node_uses(node), self._rows_made(node))
        below: set[int] = set()
        ends: set[int] = set()
        for node in self._calls():
            if id(node) in self.inside or not self._alone(node):
                continue
            given = self._row_operands(node)
            wide = [name for name in given if self._is_wide(name)]
            if made.intersection(given) and made.issuperset(wide):
                below.add(id(node))
                made.update(_names(node))
                if wide and not any(map(self._is_wide, _names(node))):
                    ends.add(id(node))
        for node in self._calls():
            whole = summed(self.graph, node)
            maker = self.graph.producers[whole[0]] if whole else node
            if id(maker) in below:
                ends.add(id(maker))
        self._keep_leading(below, ends)

    def _keep_leading(self, below: set[int], ends: set[int]) -> None:
        """Add those below products that are ends, or lead to what is inside."""
        read: set[str] = set()
        for node in reversed(self.nodes):
            leads = id(node) in ends or bool(read.intersection(_names(node)))
            if id(node) in self.inside or (id(node) in below and leads):
                self.inside.add(id(node))
                read.update(node_uses(node))

    def _calls(self) -> Iterator[Call]:
        return (node for node in self.nodes if isinstance(node, Call))

    def _alone(self, node: Call) -> bool:
        return works_on_rows(self.graph, node, self.rows)

    def _row_operands(self, node: Call) -> list[str]:
        return [x for x in node_uses(node) if has_rows(self.graph, node, x, self.rows)]

    def _rows_made(self, node: Call) -> list[str]:
        """Of a product: its rows, not the gradient of its experts."""
        shapes = ((name, self.graph.values[name].shape) for name in _names(node))
        return [name for name, shape in shapes if shape[0] == self.rows and len(shape) == 2]

    def _is_wide(self, name: str) -> bool:
        return prod(self.graph.values[name].shape[1:]) > 1


def _names(node: Node) -> list[str]:
    return [value.name for value in node.outputs if value] if isinstance(node, Call) else []
