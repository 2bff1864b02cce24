"""Intent: a strategy that names a parameter's layout means how the parameter is used, not only how it is stored.

By bytes alone a strategy would lose its meaning. At small batches, data parallelism would turn into
slicing the replicated weights at no cost and gathering activations; at large ones, weights that the
user split for tensor parallelism would be gathered wherever they are used. So deduction charges
what departs from the intent, on the edges from a parameter to its users and from a gradient to its
update, through views and casts in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from weft.compiler.calls import operand_names
from weft.compiler.deduce_boxing import Table
from weft.compiler.deduce_hints import Hints
from weft.compiler.kept import kept_values
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph, Node, Update
from weft.layout import SBP, Broadcast, Split

# What an edge is charged for along one axis:
#   "whole"   a parameter that is whole on every rank is cut for use
#   "gather"  a gradient of a parameter that is whole on every rank was made in pieces
#   "split"   a parameter that the user split is used in another layout
#   "pieces"  a gradient of a parameter that is stored in shards, but used whole, was made in pieces
#   "kept"    what only the backward of its maker understands would be boxed
Intent: TypeAlias = Literal["whole", "gather", "split", "pieces", "kept", ""]
Intents: TypeAlias = tuple[Intent, ...]
_NEVER = 1e9  # more than anything else costs


def intents(graph: LogicalGraph, hints: Hints, axes: int) -> dict[str, Intents]:
    """For each value that carries a parameter or only its gradient: the intents, one for each axis."""
    inputs = [node for node in graph.of_kind(Input) if node.role == "parameter"]
    sbps = {node.value.name: hints.inputs.get(node.key, (None,) * axes) for node in inputs}
    stored = {
        node.value.name: hints.stored[node.key] for node in inputs if node.key in hints.stored
    }
    kept: Intents = tuple("kept" for _ in range(axes))
    found: dict[str, Intents] = dict.fromkeys(kept_values(graph), kept)
    gradients = _gradients(graph, sbps)
    for name, parameter in gradients.items():
        usual: Intents = tuple(
            "" if isinstance(sbp, Split) else "gather" for sbp in sbps[parameter]
        )
        passed = _passed_on(graph, name, gradients)
        found[name] = _at(usual, stored.get(parameter), "" if passed else "pieces")
    for name, (parameter, whole) in _uses(graph, sbps).items():
        usual = tuple("split" if isinstance(sbp, Split) else "whole" for sbp in sbps[parameter])
        found[name] = _at(usual, stored.get(parameter), "whole" if whole else "")
    return found


def _at(usual: Intents, axis: int | None, intent: Intent) -> Intents:
    """The usual intents with another one along `axis`, if there is one."""
    return tuple(intent if number == axis else each for number, each in enumerate(usual))


def departures(
    intent: Intent, source: tuple[SBP, ...], target: tuple[SBP, ...], cost_model: CostModel
) -> Table:
    """How many times its bytes an edge is charged, for each SBP before and each after on one axis."""

    def factor(before: SBP, after: SBP) -> float:
        match intent, before, after:
            case ("whole", Broadcast(), Split()) | ("gather", Split(), Broadcast()):
                return cost_model.whole_parameter
            case "pieces", Split(), _:
                return cost_model.whole_parameter
            case "kept", _, _ if after != before:
                return _NEVER
            case "split", Split(), _ if after != before:
                return cost_model.split_parameter
        return 0.0

    return np.array([[factor(before, after) for after in target] for before in source])


def _uses(graph: LogicalGraph, parameters: Mapping[str, object]) -> dict[str, tuple[str, bool]]:
    """Parameters, and what ops of one operand make of them, such as transposes and casts.

    For each the parameter's name, and whether one that is stored in shards is whole there.
    """
    found = {name: (name, False) for name in parameters}
    for node in graph.of_kind(Call):
        names = operand_names(node)
        if len(names) == 1 and names[0] in found and _is_ours(node):
            parameter, whole = found[names[0]]
            here = (parameter, whole or node.op == "weft.hint")
            found.update((v.name, here) for v in node.outputs if v is not None)
    return found


def _is_ours(node: Call) -> bool:
    """Whether a call is no hint of the user's, which ends what the strategy means."""
    return node.op != "weft.hint" or len(node.args) > 2


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
    passes = _is_ours(node) and (len(names) == 1 or node.op == "aten.add.Tensor")
    return names if passes else ()


def _passed_on(graph: LogicalGraph, name: str, gradients: Mapping[str, str]) -> bool:
    """Whether a gradient is one that was there before, in another form."""
    node = graph.producers[name]
    size = math.prod(graph.values[name].shape)
    return isinstance(node, Call) and any(
        used in gradients and math.prod(graph.values[used].shape) == size for used in _passed(node)
    )


def _measures(node: Node) -> bool:
    """Whether a node only takes a number from a gradient."""
    return isinstance(node, Call) and node.op in ("weft.square_sum", "weft.nonfinite")
