"""Nodes that read other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.ir.arguments import Ref, with_names
from weft.ir.nodes import Box, Call, Node, Output, Update


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """`node` reading other values: new names by old ones. An update's target and states stay."""

    def ref(old: Ref) -> Ref:
        return Ref(names.get(old.name, old.name))

    match node:
        case Call():
            return with_names(node, names)
        case Update(source=source, skip=skip):
            return replace(node, source=ref(source), skip=skip and ref(skip))
        case Output(value=value):
            return replace(node, value=ref(value))
        case Box(input=value):
            return replace(node, input=ref(value))
        case _:
            return node
