"""Durations of the acts of a plan, estimated from shapes and a model of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from weft.errors import RuleError
from weft.hardware import Device
from weft.ir.plan import (
    Actor,
    Communicate,
    Communicator,
    Compute,
    Exchange,
    LocalCall,
    LocalProgram,
    LocalUpdate,
    LocalValue,
    Piece,
    Transfer,
)
from weft.ir.queries.memory import value_bytes
from weft.ir.queries.op_calls import local_op_call
from weft.layout import region_size
from weft.ops import OpCall
from weft.ops.weft_ops import WEFT_OPS
from weft.units import ITEM_SIZE, Bytes, Flops, Seconds


@final
class Durations:
    """Estimates for the ranks of one program; equal calls, such as those of repeated layers, are estimated once."""

    def __init__(self, device: Device, communicators: Sequence[Communicator]) -> None:
        self._device = device
        self._sizes = {one.id: len(one.ranks) for one in communicators}
        self._known: dict[OpCall, Seconds] = {}
        # Of each call that was met, with it: the same ones stand in several plans of a rank.
        self._met: dict[int, tuple[LocalCall, Seconds]] = {}

    def of(self, program: LocalProgram, actors: Sequence[Actor]) -> tuple[Seconds, ...]:
        """Seconds of one act of each actor."""
        return tuple(self._actor(actor, program.values) for actor in actors)

    def _actor(self, actor: Actor, values: Mapping[str, LocalValue]) -> Seconds:
        match actor:
            case Compute():
                return Seconds(sum(self.node(node, values) for node in actor.nodes))
            case Communicate():
                return self.exchange(actor.collectives)
        return Seconds(0.0)

    def node(self, node: LocalCall | LocalUpdate, values: Mapping[str, LocalValue]) -> Seconds:
        """Seconds of a call or an update, given the values that it reads and makes."""
        if isinstance(node, LocalUpdate):
            return self._update(node, values)
        met = self._met.get(id(node))
        if met is None:
            met = self._met[id(node)] = node, self._estimate(local_op_call(node, values))
        return met[1]

    def _estimate(self, call: OpCall) -> Seconds:
        found = self._known.get(call)
        if found is None:
            own = WEFT_OPS.get(call.op)
            try:
                found = self._device.call(replace(call, op=own.like) if own and own.like else call)
            except RuleError:
                found = self._device.without_rule(call)
            self._known[call] = found
        return found

    def exchange(self, joined: Sequence[Exchange]) -> Seconds:
        """Seconds of collectives, or of a transfer, that run as one."""
        return self._device.communication(Bytes(sum(map(self._moved, joined))))

    def _update(self, node: LocalUpdate, values: Mapping[str, LocalValue]) -> Seconds:
        """Everything is read once, target and states are written."""
        touched = (node.target, node.target, node.source, *node.states, *node.states)
        moved = sum(value_bytes(values[name]) for name in touched)
        return self._device.work(Flops(0), Bytes(moved))

    def _moved(self, node: Exchange) -> Bytes:
        """The bytes that a rank sends or receives, whichever is more."""
        if isinstance(node, Transfer):
            sides = ((node.input, node.sends), (node.output, node.receives))
            return max(_piece_bytes(value, pieces) for value, pieces in sides)
        return Bytes(node.bytes // self._sizes[node.communicator])


def _piece_bytes(value: LocalValue | None, pieces: Sequence[Piece]) -> Bytes:
    size = 0 if value is None else ITEM_SIZE[value.dtype]
    return Bytes(sum(region_size(region) for _, region in pieces) * size)
