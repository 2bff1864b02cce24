"""Views that undo earlier ones.

A sum in place on a view comes back from capture as views there and back. Flattened in between, a split of
positions would be none of the rows. Before: a graph without layouts. After: an equal one, in which what is
viewed there and back is read as it is.
"""

from __future__ import annotations

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import needed, renamed
from weft.ir.logical import Call, LogicalGraph, Ref
from weft.ops.rule import aten

_VIEWS = frozenset(aten("view _unsafe_view reshape"))


def undo_views(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """The graph without views of views that give back a shape from before."""
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
