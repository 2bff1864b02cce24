"""The logical graph: the whole training step on whole tensors, as one device would run it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, final

from weft.cached import cached_property
from weft.ir.forms import micro_text, node_text, quoted
from weft.ir.nodes import FORWARD as FORWARD
from weft.ir.nodes import OVER_STEP as OVER_STEP
from weft.ir.nodes import ROLES as ROLES
from weft.ir.nodes import VARIABLE_ROLES as VARIABLE_ROLES
from weft.ir.nodes import Arg as Arg
from weft.ir.nodes import Box as Box
from weft.ir.nodes import Call as Call
from weft.ir.nodes import Hint as Hint
from weft.ir.nodes import Input as Input
from weft.ir.nodes import Location as Location
from weft.ir.nodes import Node as Node
from weft.ir.nodes import Output as Output
from weft.ir.nodes import PerMicroBatch as PerMicroBatch
from weft.ir.nodes import Phase as Phase
from weft.ir.nodes import PhaseKind as PhaseKind
from weft.ir.nodes import Ref as Ref
from weft.ir.nodes import Role as Role
from weft.ir.nodes import Update as Update
from weft.ir.nodes import Value as Value
from weft.ir.nodes import refs as refs
from weft.layout import Placement
from weft.ops.rule import kept_results


@final
@dataclass(frozen=True)
class LogicalGraph:
    """A training or evaluation step at logical size.

    Order of `nodes`: inputs, then calls and boxings in topological order, then updates, then
        outputs. With `micro_batches` > 1, values that depend on the batch are those of one
        micro-batch (`loop`).
    """

    name: str
    nodes: tuple[Node, ...]
    micro_batches: int = 1

    @cached_property
    def held(self) -> set[object]:
        """The rules that were found to hold (`weft.ir.legal.tables`): a graph never changes."""
        return set()

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every value by name."""
        return {value.name: value for node in self.nodes for value in node.makes}

    @cached_property
    def producers(self) -> dict[str, Node]:
        """The node that makes each value."""
        return {value.name: node for node in self.nodes for value in node.makes}

    @cached_property
    def users(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each value, in order; a node that reads a value twice stands once."""
        found: dict[str, list[Node]] = {name: [] for name in self.values}
        for node in self.nodes:
            uses = node.uses
            for name in uses if len(uses) < 2 else dict.fromkeys(uses):
                found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def loop(self) -> frozenset[str]:
        """The values that are made once per micro-batch; all others are made once a step."""
        found = {node.value.name for node in self.of_kind(Input) if node.sent == "each"}
        for node in self.nodes:
            over = isinstance(node, Call) and node.op in OVER_STEP
            if not over and runs_in_loop(node, found):
                found.update([value.name for value in node.makes])
        return frozenset(found)

    @cached_property
    def kept_values(self) -> frozenset[str]:
        """Results that a forward saves in a form that its backward alone understands, such as a kernel's workspace.

        They go there as they were made: no boxing may be between, and no packing of micro-batches.
        """
        return frozenset(
            value.name
            for call in self.of_kind(Call)
            for number in kept_results(call.op)
            if (value := call.outputs[number]) is not None
        )

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of all layouts, in order of first appearance."""
        layouts = (value.layout for value in self.values.values() if value.layout is not None)
        return tuple(dict.fromkeys(layout.placement for layout in layouts))

    def __str__(self) -> str:
        """One node a line; `weft.ir.parse_graph` reads it back to an equal graph."""
        lines = [f"graph {quoted(self.name)}{micro_text(self.micro_batches)}"]
        lines += [f"placement @{index} = {each}" for index, each in enumerate(self.placements)]
        lines += [node_text(node, self.placements) for node in self.nodes]
        return "\n".join(lines) + "\n"

    def with_nodes(self, nodes: Iterable[Node]) -> LogicalGraph:
        """The graph with these nodes: itself, with all that is known of it, where they are its very own."""
        every = tuple(nodes)
        same = len(every) == len(self.nodes) and all(map(is_, every, self.nodes))
        return self if same else replace(self, nodes=every)

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """The nodes of one kind, in order."""
        return list(self._by_kind.get(kind, ()))

    @cached_property
    def _by_kind(self) -> dict[type[Any], list[Node]]:
        found: dict[type[Any], list[Node]] = {}
        for node in self.nodes:
            found.setdefault(type(node), []).append(node)
        return found


def runs_in_loop(node: Node, loop: frozenset[str] | set[str]) -> bool:
    """True if a node runs once per micro-batch, with `loop` the loop values before it."""
    if isinstance(node, Call) and node.varyings:
        return True
    return not loop.isdisjoint(node.uses)
