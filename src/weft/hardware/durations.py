"""Durations of the acts of a plan, estimated from shapes and the costs of a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias, final

from weft.hardware.call_text import lying, makers_of
from weft.hardware.costs import Cost, Costs, Groups, Sent
from weft.ir.plan import (
    Actor,
    Collective,
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
from weft.ir.queries.alias import value_bytes
from weft.ir.queries.op_calls import local_op_call
from weft.layout import region_size
from weft.ops import OpCall
from weft.units import ITEM_SIZE, Bytes, Seconds

Values: TypeAlias = Mapping[str, LocalValue]
Makers: TypeAlias = Mapping[str, LocalCall]


@final
class Durations:
    """Estimates for the ranks of one program; equal calls, such as those of repeated layers, are estimated once.

    Args:
        costs: of the machine.
        communicators: of the program.
        families: for each communicator, the ids of those that run what it runs at the same time;
            those that are missing run by themselves.
    """

    def __init__(
        self,
        costs: Costs,
        communicators: Sequence[Communicator],
        families: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._costs = costs
        self._ranks = {one.id: one.ranks for one in communicators}
        self.families = families or {}
        self._known: dict[tuple[int, OpCall, tuple[str, ...]], Cost] = {}
        # Of each call that was met, with it: the same ones stand in several plans of a rank.
        self._met: dict[tuple[int, int], tuple[LocalCall, Cost]] = {}
        self._exchanged: dict[tuple[object, ...], Cost] = {}

    def of(self, program: LocalProgram, actors: Sequence[Actor]) -> tuple[Seconds, ...]:
        """Seconds of one act of each actor."""
        makers = makers_of(program.nodes)
        return tuple(self._actor(actor, program, makers) for actor in actors)

    def _actor(self, actor: Actor, program: LocalProgram, makers: Makers) -> Seconds:
        match actor:
            case Compute():
                values, rank = program.values, program.rank
                costs = self.of_act(actor, values, rank, makers)
                calls = sum(cost.seconds for cost in costs)
                return Seconds(calls + self._costs.of_act(program.rank))
            case Communicate():
                took = self.communication(actor.collectives, program.rank).seconds
                return Seconds(took + self._costs.of_act(program.rank))
        return Seconds(0.0)

    def of_act(self, actor: Compute, values: Values, rank: int, makers: Makers) -> tuple[Cost, ...]:
        """The costs of the calls and updates of an act, in order; arguments as of `cost`."""
        rules = Counter(node.rule for node in actor.nodes if isinstance(node, LocalUpdate))
        return tuple(
            self.cost(
                *(node, values, rank, makers),
                rules[node.rule] if isinstance(node, LocalUpdate) else 1,
            )
            for node in actor.nodes
        )

    def node(self, node: LocalCall | LocalUpdate, values: Values, rank: int = 0) -> Seconds:
        """Seconds of a call or an update, given the values that it reads and makes."""
        return self.cost(node, values, rank).seconds

    def cost(
        self,
        node: LocalCall | LocalUpdate,
        values: Values,
        rank: int = 0,
        makers: Makers = MappingProxyType({}),
        together: int = 1,
    ) -> Cost:
        """The cost of a call or an update on a rank.

        Args:
            node: the call or update.
            values: that it reads and makes.
            rank: that it runs on.
            makers: the call that makes each value, where that is known: operands may be views.
            together: how many variables its act updates by the same rule.
        """
        home = self._costs.like(rank)
        if isinstance(node, LocalUpdate):
            return self._costs.of_update(home, node.rule, update_bytes(node, values), together)
        met = self._met.get((id(node), home))
        if met is None:
            lies = lying(node, makers, values)
            met = node, self._estimate(local_op_call(node, values), home, lies)
            self._met[id(node), home] = met
        return met[1]

    def _estimate(self, call: OpCall, home: int, lies: tuple[str, ...]) -> Cost:
        found = self._known.get((home, call, lies))
        if found is None:
            found = self._known[home, call, lies] = self._costs.of_call(home, call, lies)
        return found

    def exchange(self, joined: Sequence[Exchange], rank: int = 0) -> Seconds:
        """Seconds of collectives, or of a transfer, that run as one."""
        return self.communication(joined, rank).seconds

    def communication(self, joined: Sequence[Exchange], rank: int = 0) -> Cost:
        """The cost of collectives, or of a transfer, that run as one, as a rank sees it."""
        first = joined[0]
        moved = Bytes(sum(map(self._moved, joined)))
        if isinstance(first, Transfer):
            sent = [piece for each in joined for piece in self._pieces(each, rank)]
            return self._costs.of_transfer(sent, moved)
        size = joined_size(joined)
        key = first.kind, first.communicator, size, moved
        found = self._exchanged.get(key)
        if found is None:
            groups = self._groups(first.communicator)
            found = self._costs.of_collective(first.kind, size, moved, groups)
            self._exchanged[key] = found
        return found

    def _groups(self, communicator: int) -> Groups:
        family = self.families.get(communicator, (communicator,))
        return [self._ranks[one] for one in family if one in self._ranks]

    def _pieces(self, node: Exchange, rank: int) -> Sent:
        """The pieces that a rank sends to others and receives from them."""
        if not isinstance(node, Transfer):
            return ()
        ranks = self._ranks.get(node.communicator, ())
        found = []
        for value, pieces, out in (
            (node.input, node.sends, True),
            (node.output, node.receives, False),
        ):
            for peer, region in pieces if ranks else ():
                if ranks[peer] != rank:
                    ends = (rank, ranks[peer]) if out else (ranks[peer], rank)
                    found.append((*ends, _piece_bytes(value, ((peer, region),))))
        return found

    def _moved(self, node: Exchange) -> Bytes:
        """The bytes that a rank sends or receives, whichever is more."""
        if isinstance(node, Transfer):
            sides = ((node.input, node.sends), (node.output, node.receives))
            return max(_piece_bytes(value, pieces) for value, pieces in sides)
        return Bytes(node.bytes // len(self._ranks[node.communicator]))


def joined_size(joined: Sequence[Exchange]) -> Bytes:
    """Bytes of collectives that run as one: of each its larger side."""
    return Bytes(sum(larger_side(each) for each in joined if isinstance(each, Collective)))


def update_bytes(node: LocalUpdate, values: Values) -> Bytes:
    """Bytes that an update reads and writes: everything is read once, target and states are written."""
    touched = (node.target, node.target, node.source, *node.states, *node.states)
    return Bytes(sum(value_bytes(values[name]) for name in touched))


def larger_side(node: Collective) -> Bytes:
    """Bytes of the larger side of a collective on one rank: what comes out of an all_gather, what goes into others."""
    return value_bytes(node.output if node.kind == "all_gather" else node.input)


def _piece_bytes(value: LocalValue | None, pieces: Sequence[Piece]) -> Bytes:
    size = 0 if value is None else ITEM_SIZE[value.dtype]
    return Bytes(sum(region_size(region) for _, region in pieces) * size)
