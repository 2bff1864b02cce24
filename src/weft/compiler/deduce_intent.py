"""Intent: a strategy that names a parameter's layout means how the parameter is used, not only how it is stored.

By bytes alone a strategy would lose its meaning. At small batches, data parallelism would turn into
slicing the replicated weights at no cost and gathering activations; at large ones, weights that the
user split for tensor parallelism would be gathered wherever they are used. So deduction charges
what departs from the intent, on the edges from a parameter to its users and from a gradient to its
update, through views and casts in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from weft.compiler.calls import operand_names
from weft.compiler.deduce_boxing import Table
from weft.compiler.deduce_hints import Hints
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph, Node, Update
from weft.layout import SBP, Broadcast, Split

# What an edge is charged for along one axis:
#   "whole"   a parameter that is whole on every rank is cut for use
#   "gather"  a gradient of a parameter that is whole on every rank was made in pieces
#   "split"   a parameter that the user split is used in another layout
Intent: TypeAlias = Literal["whole", "gather", "split", ""]
Intents: TypeAlias = tuple[Intent, ...]


def intents(graph: LogicalGraph, hints: Hints, axes: int) -> dict[str, Intents]:
    """For each value that carries a parameter or only its gradient: the intents, one for each axis."""
    sbps = {
        node.value.name: hints.inputs.get(node.key, (None,) * axes)
        for node in graph.of_kind(Input)
        if node.role == "parameter"
    }
    found: dict[str, Intents] = {}
    for name, parameter in _gradients(graph, sbps).items():
        found[name] = tuple("" if isinstance(sbp, Split) else "gather" for sbp in sbps[parameter])
    for name, parameter in _uses(graph, sbps).items():
        found[name] = tuple(
            "split" if isinstance(sbp, Split) else "whole" for sbp in sbps[parameter]
        )
    return found


def departures(
    intent: Intent, source: tuple[SBP, ...], target: tuple[SBP, ...], cost_model: CostModel
) -> Table:
    """How many times its bytes an edge is charged, for each SBP before and each after on one axis."""

    def factor(before: SBP, after: SBP) -> float:
        match intent, before, after:
            case ("whole", Broadcast(), Split()) | ("gather", Split(), Broadcast()):
                return cost_model.whole_parameter
            case "split", Split(), _ if after != before:
                return cost_model.split_parameter
        return 0.0

    return np.array([[factor(before, after) for after in target] for before in source])


def _uses(graph: LogicalGraph, parameters: Mapping[str, object]) -> dict[str, str]:
    """Parameters, and what ops of one operand make of them, such as transposes and casts: name -> parameter."""
    found = {name: name for name in parameters}
    for node in graph.of_kind(Call):
        names = operand_names(node)
        if len(names) == 1 and names[0] in found and node.op != "weft.hint":
            found.update((v.name, found[names[0]]) for v in node.outputs if v is not None)
    return found


def _gradients(graph: LogicalGraph, parameters: Mapping[str, object]) -> dict[str, str]:
    """Sources of updates, and what becomes one by ops of one operand or by adding up: name -> parameter."""
    found = {
        update.source.name: update.target.name
        for update in graph.of_kind(Update)
        if update.target.name in parameters
    }
    for node in reversed(graph.of_kind(Call)):
        made = [value.name for value in node.outputs if value]
        if len(made) != 1 or made[0] not in found:
            continue
        for name in _passed(node):
            if sum(not _measures(reader) for reader in graph.users[name]) == 1:
                found[name] = found[made[0]]
    return found


def _passed(node: Call) -> tuple[str, ...]:
    """The operands that are gradients when the result is one."""
    names = operand_names(node)
    if node.op == "weft.scale":
        return names[:1]
    passes = node.op != "weft.hint" and (len(names) == 1 or node.op == "aten.add.Tensor")
    return names if passes else ()


def _measures(node: Node) -> bool:
    """Whether a node only takes a number from a gradient."""
    return isinstance(node, Call) and node.op in ("weft.square_sum", "weft.nonfinite")
