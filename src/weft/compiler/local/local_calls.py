"""The local form of calls: what a rank runs of each, by the layouts of what it reads and makes.

What ranks run alike is made once, for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.microbatch.prepare import joined
from weft.compiler.signatures import axis_signatures
from weft.errors import InternalError
from weft.ir.logical import Call, LogicalGraph, Node, Update
from weft.ir.nodes import Phase
from weft.ir.plan import LocalCall, LocalValue
from weft.ir.queries.op_calls import layout_of, made_of, named_arguments, op_call
from weft.layout import Placement
from weft.ops import OpCall, TensorSpec
from weft.ops import localize as localize_call


@final
@dataclass(frozen=True)
class Shared:
    """The data that the walks of all ranks have in common.

    Attributes:
        communicator_of: the communicator of a group of ranks.
        loop: the values of the graph that are made once per micro-batch.
        phases: of each node.
        places: of each node, where it runs; None of one that no placement alone can tell of.
        calls: what runs of a call at each position, by all else that it depends on: layers repeat
            themselves.
        local_calls: what some rank runs of a node, by the node, what it is made of (with it) and its
            operands: other ranks run the same.
    """

    graph: LogicalGraph
    communicator_of: Mapping[tuple[int, ...], int]
    loop: frozenset[str]
    phases: Sequence[Phase]
    places: Sequence[Placement | None]
    calls: dict[tuple[object, ...], dict[tuple[int, ...], OpCall]] = field(default_factory=dict)
    local_calls: dict[tuple[object, ...], tuple[OpCall, LocalCall]] = field(default_factory=dict)

    def call(self, node: Call, rank: int) -> OpCall:
        """The local form of a call for `rank`.

        Raises:
            InternalError: where the layouts of its results say otherwise.
        """
        if node.varyings:
            return self._checked(node, rank)
        values = self.graph.values
        operands = tuple([values[name].layout for name in node.operands])
        results = tuple([value and value.layout for value in node.outputs])
        place = next(layout for layout in (*results, *operands) if layout)
        position = place.placement.coordinates[rank]
        known = self.calls.setdefault((op_call(self.graph, node), operands, results), {})
        if position not in known:
            call = self._checked(node, rank)
            # One object where ranks run the same, which they then share all the way.
            known[position] = next((each for each in known.values() if each == call), call)
        return known[position]

    def local_call(self, node: Call, rank: int, names: Sequence[str], phase: Phase) -> LocalCall:
        """The call that `rank` runs on the local values of these names; one object where ranks run the same."""
        call = self.call(node, rank)
        key = id(node), id(call), *names
        if key not in self.local_calls:
            self.local_calls[key] = call, _local_call(node, call, names, phase)
        return self.local_calls[key][1]

    def _checked(self, node: Call, rank: int) -> OpCall:
        """The rule's idea of the local results must be the layouts'."""
        call = localized_call(self.graph, node, rank)
        expected = tuple(
            value and TensorSpec(layout_of(value).local_shape(value.shape, rank), value.dtype)
            for value in node.outputs
        )
        if call.results != expected:
            raise InternalError(
                f"the rule of {node.op} gives rank {rank} {call.results}, its layouts say {expected}"
            )
        return call


def _local_call(node: Call, call: OpCall, names: Sequence[str], phase: Phase) -> LocalCall:
    """`call`, a rank's part of `node`, on the local values of these names."""
    outputs = tuple(
        [
            LocalValue(value.name, spec.shape, spec.dtype) if value and spec else None
            for value, spec in zip(node.outputs, call.results, strict=True)
        ]
    )
    args, kwargs = named_arguments(call, names)
    return made_of(LocalCall(call.op, args, kwargs, outputs, phase), call, names)


def localized_call(graph: LogicalGraph, node: Call, rank: int) -> OpCall:
    """The local form of a call for `rank`; arguments that differ between micro-batches vary."""
    if not node.varyings:
        return _at_micro_batch(graph, node, rank, 0)
    every = [_at_micro_batch(graph, node, rank, micro) for micro in range(graph.micro_batches)]
    args = joined(tuple(call.args for call in every))
    kwargs = joined(tuple(call.kwargs for call in every))
    return replace(every[0], args=args, kwargs=kwargs)


def _at_micro_batch(graph: LogicalGraph, node: Call, rank: int, micro: int) -> OpCall:
    call = op_call(graph, node, micro)
    place = place_of(graph, node)
    assert place is not None  # a call's
    at = place.coordinates[rank]
    for (signature, parts), index in zip(axis_signatures(graph, node), at, strict=True):
        call = localize_call(call, signature, parts, index)
    return call


def place_of(graph: LogicalGraph, node: Node) -> Placement | None:
    """The place where a call or an update runs: where its results, or its targets, lie. None of other nodes."""
    match node:
        case Call():
            return layout_of(node.makes[0]).placement
        case Update(target=target):
            return layout_of(graph.values[target.name]).placement
    return None
