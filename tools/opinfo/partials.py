"""Inputs that are sums which nobody reduced: hints behind them, as no hint for an input itself says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.ir.logical import Call, Input, LogicalGraph, Output, Ref, Value, node_uses
from weft.ir.nodes import HINT, Hint
from weft.layout import Layout, Partial


def with_partials(graph: LogicalGraph, laid: Mapping[str, Layout]) -> LogicalGraph:
    """The graph with a hint behind every input that is Partial, so that deduction carries the sum on."""
    nodes: list[Any] = []
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(node, Input):
            nodes.append(node)
            continue
        if nodes and isinstance(nodes[-1], Input):
            for given in graph.of_kind(Input):
                hint = _hint(given, laid.get(given.key))
                if hint is not None and hint.outputs[0] is not None:
                    renamed[given.value.name] = hint.outputs[0].name
                    nodes.append(hint)
        nodes.append(_rename(node, renamed))
    return LogicalGraph(graph.name, tuple(nodes)) if renamed else graph


def _hint(node: Input, layout: Layout | None) -> Call | None:
    if layout is None or not any(isinstance(sbp, Partial) for sbp in layout.sbp):
        return None
    value = Value(f"{node.value.name}.hinted", node.value.shape, node.value.dtype)
    return Call(HINT, (Ref(node.value.name),), (), (value,), hint=Hint(layout.sbp))


def _rename(node: Any, names: Mapping[str, str]) -> Any:
    def arg(leaf: Any) -> Any:
        if isinstance(leaf, tuple):
            return tuple(map(arg, leaf))
        return Ref(names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

    if not any(name in names for name in node_uses(node)):
        return node
    if isinstance(node, Output):
        return replace(node, value=arg(node.value))
    kwargs = tuple((key, arg(value)) for key, value in node.kwargs)
    return replace(node, args=arg(node.args), kwargs=kwargs)
