"""Dimensions in shares: calls that cut them into parts, or join them, do so within each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from weft.compiler.graph.joined.dims import JoinedDim
from weft.compiler.graph.joined.ends import in_blocks
from weft.ir.logical import Call, Input, LogicalGraph, Node, Ref, Value, node_outputs
from weft.ir.queries.op_calls import op_call
from weft.layout import Shares
from weft.ops.call import Operand, map_argument

RESHAPE = "aten.reshape.default"

# The shares of dimensions, and where each goes.
SharedDims: TypeAlias = "list[tuple[Shares, JoinedDim]]"


def with_shares(graph: LogicalGraph, dims: SharedDims) -> LogicalGraph:
    """The graph whose inputs have these dimensions in shares; equal, as its calls work within blocks."""
    return _BlocksWriter(graph, dims).written() if dims else graph


@final
@dataclass(frozen=True)
class _BlocksWriter:
    """Writes the graph with some dimensions in shares."""

    graph: LogicalGraph
    shared_dims: SharedDims
    nodes: list[Node] = field(default_factory=list)

    def written(self) -> LogicalGraph:
        """The new graph."""
        order = {
            name: replace(shares, dim=dim)
            for shares, joined in self.shared_dims
            for name, dim in joined.dims.items()
        }
        ends = {name for _, joined in self.shared_dims for name in joined.ends}
        for node in self.graph.nodes:
            made = node_outputs(node)
            if isinstance(node, Input) and node.value.name in order:
                node = replace(node, shares=order[node.value.name])
            if isinstance(node, Call) and made and made[0].name in ends:
                self._end(node, order)
            else:
                self.nodes.append(node)
        return replace(self.graph, nodes=tuple(self.nodes))

    def _end(self, node: Call, order: Mapping[str, Shares]) -> None:
        """Cut or join within each block."""
        names = (*node.uses, *(value.name for value in node.makes))
        instead = in_blocks(
            op_call(self.graph, node), next(order[name] for name in names if name in order)
        )
        refs: list[Ref] = []
        for name, shape in zip(node.operands, instead.operands, strict=True):
            source = self.graph.values[name]
            made = replace(source, name=f"{node.makes[0].name}.of{len(refs)}", shape=shape)
            self._reshape(node, source, made)
            refs.append(Ref(made.name))

        def leaf(arg: Any) -> Any:
            return refs[arg.index] if isinstance(arg, Operand) else arg

        outputs = tuple(
            replace(value, name=f"{value.name}.in_blocks", shape=shape)
            for value, shape in zip(node.makes, instead.results, strict=True)
        )
        args = map_argument(leaf, instead.args)
        self.nodes.append(replace(node, op=instead.op, args=args, kwargs=(), outputs=outputs))
        for made, value in zip(outputs, node.makes, strict=True):
            self._reshape(node, made, value)

    def _reshape(self, node: Call, source: Value, made: Value) -> None:
        args = (Ref(source.name), made.shape)
        self.nodes.append(replace(node, op=RESHAPE, args=args, kwargs=(), outputs=(made,)))
