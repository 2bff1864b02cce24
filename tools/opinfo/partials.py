"""Inputs that are sums which nobody reduced: hints behind them, as no hint for an input itself says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.ir.logical import Call, Input, LogicalGraph, Value
from weft.ir.nodes import HINT, Hint
from weft.ir.nodes import renamed as renamed_node
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
        nodes.append(renamed_node(node, renamed))
    return LogicalGraph(graph.name, tuple(nodes)) if renamed else graph


def _hint(node: Input, layout: Layout | None) -> Call | None:
    if layout is None or not any(isinstance(sbp, Partial) for sbp in layout.sbp):
        return None
    value = Value(f"{node.value.name}.hinted", node.value.shape, node.value.dtype)
    return Call.of(HINT, (node.value.ref,), (value,), hint=Hint(layout.sbp))
