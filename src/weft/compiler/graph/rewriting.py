"""Small rewrites of graphs, and what all rewrites ask of a call: the name that it reads, and its one result."""

from __future__ import annotations

from collections.abc import Mapping

from weft.compiler.context import Context
from weft.ir import nodes
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.rule import aten

_VIEWS = frozenset(aten("view _unsafe_view reshape"))


def renamed(graph: LogicalGraph, names: Mapping[str, str]) -> LogicalGraph:
    """The graph with other values in place of some; these may be replaced themselves."""
    if not names:
        return graph

    def final(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    last = {name: final(name) for name in names}
    return graph.with_nodes(nodes.renamed(node, last) for node in graph.nodes)


def needed(graph: LogicalGraph) -> LogicalGraph:
    """The graph without calls whose results nobody reads."""
    used: set[str] = set()
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not isinstance(node, Call) or any(value.name in used for value in node.makes):
            used.update(node.uses)
            kept.append(node)
    return graph.with_nodes(reversed(kept))


def ref_name(arg: Arg) -> str:
    """The name of the value that an argument is, where its op takes nothing but a tensor there."""
    assert isinstance(arg, Ref)
    return arg.name


def only_result(call: Call) -> Value:
    """The result of a call whose op has one, which is a tensor."""
    (value,) = call.outputs
    assert value is not None
    return value


def undo_views(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """The graph without views of views that give back a shape from before, as a sum in place on a view leaves them.

    Flattened in between, a split of positions would be none of the rows.
    """
    # For each view, what it was taken of, and what that was taken of, and so on; nearest first.
    sources: dict[str, tuple[str, ...]] = {}
    equal: dict[str, str] = {}
    for node in graph.of_kind(Call):
        match node:
            case Call(op=op, args=(Ref(name=name), *_)) if op in _VIEWS:
                (made,) = node.makes
                name = equal.get(name, name)
                sources[made.name] = behind = (name, *sources.get(name, ()))
                for each in behind:
                    if graph.values[each].shape == made.shape:
                        equal[made.name] = each
                        break
    return needed(renamed(graph, equal)) if equal else graph
