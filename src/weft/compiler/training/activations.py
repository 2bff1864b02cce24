"""Layouts of activations: hints on the outputs of modules that the strategy names.

Values that are only added up get the layout of their sum: attention and MLP side by side, each split by its inputs,
make parts of one sum, which is reduced once.

Before: calls outside of a module read what it made. After: they read it through `weft.hint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from weft.compiler.context import Context
from weft.compiler.graph.products_first import ADD
from weft.ir.logical import Call, Hint, LogicalGraph, Node, Value
from weft.ir.nodes import HINT, renamed
from weft.layout import SBP
from weft.patterns import around, check_named, matches

# Patterns of module paths, and the SBPs of what they return: one for all axes, or one for each.
Layouts: TypeAlias = Sequence[tuple[str, tuple[SBP, ...]]]


def lay_activations(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """Hint at what modules return that a pattern of `Options.activations` names; the first that does counts.

    A module's results are the values that it makes and that other calls of the forward read. A scalar beside
    tensors, such as a loss that balances experts, is passed over.

    Raises:
        StrategyError: when a pattern names no module.
    """
    layouts = context.options.activations
    if not layouts:
        return graph
    paths = {path for call in graph.of_kind(Call) for path in around(call.module)}
    for pattern, _ in layouts:
        named = f"activations={{{pattern!r}: …}}"
        check_named(named, pattern, paths.union(context.options.modules), "modules")
    hinted: dict[str, tuple[str, str]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        names = {old: new for old, (new, path) in hinted.items() if not _inside(node, path)}
        nodes.append(renamed(node, names))
        if isinstance(node, Call) and node.phase.kind == "forward":
            for name, path, sbps in _returned(graph, node, layouts):
                hint = _hint(node, graph.values[name], Hint(sbps))
                nodes.append(hint)
                hinted[name] = hint.makes[0].name, path
    return _on_sums(replace(graph, nodes=tuple(nodes)))


def _on_sums(graph: LogicalGraph) -> LogicalGraph:
    """The graph with one hint on a sum, in place of equal hints on both terms that nothing else reads."""
    hints = {node.makes[0].name: node for node in graph.of_kind(Call) if node.op == HINT}
    alone = {name for name in hints if len(graph.users[name]) == 1}
    names: dict[str, str] = {}
    nodes: dict[str | int, Node] = {}
    for number, old in enumerate(graph.nodes):
        node = renamed(old, names)
        nodes[node.makes[0].name if node.makes else number] = node
        if not isinstance(node, Call) or node.op != ADD or node.kwargs or len(node.operands) != 2:
            continue
        made, terms = node.makes[0], node.operands
        asked = {(hints[x].hint, hints[x].makes[0].shape) for x in terms if x in alone}
        if not alone.issuperset(terms) or asked != {(hints[terms[0]].hint, made.shape)}:
            continue
        raw = {name: hints[name].uses[0] for name in terms}
        hint = _hint(node, made, hints[terms[0]].hint)
        for name in terms:
            del nodes[name]
        nodes[made.name] = renamed(node, raw)
        names[made.name] = laid = hint.makes[0].name
        nodes[laid] = hints[laid] = hint
        alone |= {laid} if len(graph.users[made.name]) == 1 else set()
    return replace(graph, nodes=tuple(nodes.values())) if names else graph


def _hint(maker: Call, value: Value, hint: Hint | None) -> Call:
    laid, args = replace(value, name=f"{value.name}.laid"), (value.ref,)
    return Call.of(HINT, args, (laid,), location=maker.location, phase=maker.phase, hint=hint)


def _returned(
    graph: LogicalGraph, node: Call, layouts: Layouts
) -> Iterator[tuple[str, str, tuple[SBP, ...]]]:
    """Values that a call makes and a module returns: name, outermost such module, and the SBPs that they shall have."""
    for value in node.makes:
        for path in around(node.module):
            sbps = next((sbps for pattern, sbps in layouts if matches(pattern, path)), None)
            if sbps is not None and _leaves(graph, value, path):
                inside = (each for each in graph.of_kind(Call) if _inside(each, path))
                tensors = (made for each in inside for made in each.makes if made.shape)
                if value.shape or not any(_leaves(graph, made, path) for made in tensors):
                    yield value.name, path, sbps
                break


def _leaves(graph: LogicalGraph, value: Value, path: str) -> bool:
    """True if calls of the forward outside of a module read a value."""
    readers = (each for each in graph.users[value.name] if isinstance(each, Call))
    return any(x.phase.kind == "forward" and path not in around(x.module) for x in readers)


def _inside(node: Node, path: str) -> bool:
    return isinstance(node, Call) and node.phase.kind == "forward" and path in around(node.module)
