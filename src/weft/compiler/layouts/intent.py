"""Intent: a strategy that names a parameter's layout means how the parameter is used, not only how it is stored.

By bytes alone a strategy would lose its meaning. At small batches, data parallelism would turn into
slicing the replicated weights at no cost and gathering activations; at large ones, weights that the
user split for tensor parallelism would be gathered wherever they are used. So a layout that the
user fixed holds where a parameter is used, through views and casts, wherever the op has a form for
it; and where the user left it free, deduction charges a cost for layouts other than whole parameters.

Parameters that are stored in shards are deduced as if they were not, then stored so.

If a parameter is sharded along an axis, it is whole where it is used (`weft.compiler.training.shards`).
So deduction runs twice: first as if the parameters were whole, with hints that say so; everything
then keeps its layout along that axis, but for the parameters, what is made of them before they are
whole, and the gradients on their way to the updates. So the plan is that of whole parameters
with their storage changed: costs of the storage do not change the layout of an activation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

import numpy as np

from weft.compiler.hints import Hints
from weft.compiler.layouts.boxing_costs import Table
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph, Node, Update
from weft.ir.nodes import TAKE
from weft.layout import SBP, Broadcast, Partial, Split

# The intent of an edge along one axis, beside its boxing:
#   "whole"   a parameter that the user wants whole on every rank: never cut for use
#   "split"   a parameter that the user split: never used in another layout
#   "kept"    what only the backward of its maker understands: never boxed
#   "free"    a parameter that the user left free: charged where it is whole and is cut for use
#   "gather"  the gradient of a parameter that is whole: charged where it is made in pieces
#   "stored"  the same of one that is stored in shards: its reduction stops at the shard
Intent: TypeAlias = Literal["whole", "split", "kept", "free", "gather", "stored", ""]
Intents: TypeAlias = tuple[Intent, ...]


def intents(graph: LogicalGraph, hints: Hints, axes: int) -> dict[str, Intents]:
    """For each value that carries a parameter or only its gradient: the intents, one for each axis."""
    inputs = [node for node in graph.of_kind(Input) if node.role == "parameter"]
    sbps = {node.value.name: hints.inputs.get(node.key, (None,) * axes) for node in inputs}
    kept: Intents = tuple("kept" for _ in range(axes))
    found: dict[str, Intents] = dict.fromkeys(graph.kept_values, kept)
    keys = {node.value.name: node.key for node in inputs}
    for name, parameter in gradients(graph, sbps).items():
        stored = hints.stored.get(keys[parameter])
        found[name] = tuple(
            "stored" if axis == stored else "" if isinstance(sbp, Split) else "gather"
            for axis, sbp in enumerate(sbps[parameter])
        )
    for name, parameter in uses(graph, sbps).items():
        stored = hints.stored.get(keys[parameter])
        found[name] = tuple(
            ("" if axis == stored else "split")
            if isinstance(sbp, Split)
            else "free"
            if sbp is None
            else "whole"
            for axis, sbp in enumerate(sbps[parameter])
        )
    return found


def charges(
    intent: Intent, source: tuple[SBP, ...], target: tuple[SBP, ...], cost_model: CostModel
) -> Table:
    """The number of times that an edge is charged its idle bytes, for each SBP before and each after on one axis."""

    def factor(before: SBP, after: SBP) -> float:
        match intent, before, after:
            case "free", Broadcast(), Split():
                return cost_model.whole_parameter
            case "gather" | "stored", Split(), Broadcast():
                return cost_model.whole_parameter
            case "stored", Partial(), Broadcast():
                return -1.0  # a reduce-scatter moves half of what an all-reduce does
        return 0.0

    return np.array([[factor(before, after) for after in target] for before in source])


def forbidden(
    intent: Intent, source: tuple[SBP, ...], target: tuple[SBP, ...], cost_model: CostModel
) -> Table | None:
    """1 for each SBP before and each after, on one axis, that must not meet; None if all may."""

    def breaks(before: SBP, after: SBP) -> bool:
        match intent:
            case "kept":
                return after != before
            case "split":
                return cost_model.hints_hold and isinstance(before, Split) and after != before
            case "whole":
                # A bias may be one rank's, where it is added to parts; nothing else of a parameter.
                added = before == Broadcast() and after == Partial()
                return cost_model.hints_hold and not (added or before == after == Broadcast())
        return False

    found = np.array([[float(breaks(before, after)) for after in target] for before in source])
    return found if found.any() else None


def uses(graph: LogicalGraph, parameters: Mapping[str, object]) -> dict[str, str]:
    """Parameters, and what ops of one operand make of them, such as transposes and casts: name -> parameter.

    A repeated parameter, such as a token for each sequence of the batch, is an activation.

    Args:
        parameters: by name, the SBPs that the strategy says: a hint that says the same ends no intent.
    """
    found = {name: name for name in parameters}
    for node in graph.of_kind(Call):
        names = node.operands
        if len(names) != 1 or names[0] not in found:
            continue
        parameter = found[names[0]]
        if is_ours(node) or node.hint.sbps == parameters[parameter]:
            size = math.prod(graph.values[names[0]].shape)
            made = (value for value in node.outputs if value and math.prod(value.shape) <= size)
            found.update((value.name, parameter) for value in made)
    return found


def is_ours(node: Call) -> bool:
    """True if a call is not a hint of the user's, by which the strategy's intent ends."""
    return node.hint is None or node.hint.stored is not None


def gradients(graph: LogicalGraph, parameters: Mapping[str, object]) -> dict[str, str]:
    """Sources of updates, and what becomes one by ops of one operand or by adding up: name -> parameter."""
    found = {
        update.source.name: update.target.name
        for update in graph.of_kind(Update)
        if update.target.name in parameters
    }
    for node in reversed(graph.of_kind(Call)):
        made = [value.name for value in node.makes]
        if len(made) != 1 or made[0] not in found:
            continue
        for name in _passed(node):
            if sum(not measures(reader) for reader in graph.users[name]) == 1:
                found[name] = found[made[0]]
    return found


def _passed(node: Call) -> tuple[str, ...]:
    names = node.operands
    if node.op == "weft.scale":
        return names[:1]
    passes = is_ours(node) and (len(names) == 1 or node.op == "aten.add.Tensor")
    return names if passes else ()


def passed_on(graph: LogicalGraph, name: str, gradients: Mapping[str, str]) -> bool:
    """True if a gradient is one that was there before, in another form."""
    node = graph.producers[name]
    size = math.prod(graph.values[name].shape)
    return isinstance(node, Call) and any(
        used in gradients and math.prod(graph.values[used].shape) == size for used in _passed(node)
    )


def measures(node: Node) -> bool:
    """True if a node only takes a number from a gradient."""
    return isinstance(node, Call) and node.op in ("weft.square_sum", "weft.nonfinite")


def as_if_unsharded(graph: LogicalGraph, hints: Hints) -> tuple[LogicalGraph, Hints]:
    """The graph and its hints as if no parameter were sharded.

    Takes of a shard become takes of the whole, and what makes gradients shards leaves their layout
    free.
    """
    inputs = {
        key: tuple(
            Broadcast() if axis == hints.stored.get(key) else sbp for axis, sbp in enumerate(sbps)
        )
        for key, sbps in hints.inputs.items()
    }
    nodes: list[Node] = []
    for node in graph.nodes:
        hint = node.hint if isinstance(node, Call) else None
        if isinstance(node, Call) and hint is not None and hint.stored is not None:
            whole = Broadcast() if node.op == TAKE or _makes_whole(node) else None
            node = node.changed(hint=hint.with_axis(hint.stored, whole))
        nodes.append(node)
    return graph.with_nodes(nodes), replace(hints, inputs=inputs, shares=None)


@final
@dataclass(frozen=True)
class Storage:
    """Values whose layout along an axis may differ from data parallelism: as made, and as boxed for readers."""

    made: frozenset[str]
    read: frozenset[str]


def storage(graph: LogicalGraph, stored: Mapping[str, int], axis: int) -> Storage:
    """The values that may be laid out differently along `axis` than where parameters are whole.

    Args:
        stored: the axis of the shards, for the key of each parameter that is stored in some.
    """
    inputs = [node for node in graph.of_kind(Input) if node.role == "parameter"]
    names = {node.value.name: node.key for node in inputs if stored.get(node.key) == axis}
    # Parameters and what is made of their shards, up to where they are whole.
    shards, summed = set(names), gradients(graph, names)
    for node in graph.of_kind(Call):
        read = node.operands
        if len(read) == 1 and read[0] in shards and not _makes_whole(node):
            shards.update(value.name for value in node.makes)
    # Gradients that were gradients before, in another form, and what only takes a number from them.
    passed = {name for name in summed if passed_on(graph, name, summed)}
    for node in (user for name in summed for user in graph.users[name] if measures(user)):
        passed.update(value.name for value in node.makes)
    return Storage(frozenset(shards | passed), frozenset(shards.union(summed)))


def _makes_whole(node: Call) -> bool:
    hint = node.hint
    stored = None if hint is None or node.op == TAKE else hint.stored
    return hint is not None and stored is not None and hint.at(stored) == Broadcast()
