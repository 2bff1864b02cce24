"""Durations of the acts of a plan, and the texts by which tables of measured costs name calls.

Equal texts take equally long: where a shard begins, which ranks of one program differ by, is left out; an operand that
is a view is named by the call that makes it, since kernels depend on strides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias, final

from weft.hardware.costs import Cost, Costs, Sent
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
from weft.layout import region_size
from weft.ops import OpCall, Operand, shard_places, shares_memory
from weft.ops.call import Argument, PerMicroBatch, Token
from weft.units import ITEM_SIZE, Bytes, Seconds

# Views of a tensor that is laid out in order are laid out so too.
_IN_ORDER = frozenset(
    (
        *("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"),
        *("aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims"),
        *("aten.alias.default", "aten.detach.default"),
    )
)


def call_text(call: OpCall, lies: Sequence[str] = ()) -> str:
    """One call on one line, such as "aten.mm.default(float32[8, 4], aten.t.default(float32[2, 4]))".

    Args:
        call: of one rank.
        lies: for each operand, the text of the view that it is; empty if it is none (`view_texts`).
    """
    specs = tuple(f"{spec.dtype}[{', '.join(map(str, spec.shape))}]" for spec in call.operands)
    operands = tuple(own or spec for own, spec in zip(lies, specs, strict=True)) if lies else specs
    places, count = shard_places(call.op), len(call.args)
    shown = [
        "_" if place in places or place - count in places else _text(arg, operands)
        for place, arg in enumerate(call.args)
    ]
    shown += [f"{name}={_text(arg, operands)}" for name, arg in call.kwargs]
    return f"{call.op}({', '.join(shown)})"


def makers_of(nodes: Iterable[object]) -> dict[str, LocalCall]:
    """The call that makes each local value of a program."""
    return {v.name: node for node in nodes if isinstance(node, LocalCall) for v in node.makes}


def view_texts(
    node: LocalCall, makers: Mapping[str, LocalCall], values: Mapping[str, LocalValue]
) -> tuple[str, ...]:
    """For each operand of a call, the text of the view that it is; empty for those that are laid out in order."""
    return tuple([_view_text(name, makers, values) for name in node.operands])


def _view_text(name: str, makers: Mapping[str, LocalCall], values: Mapping[str, LocalValue]) -> str:
    maker = makers.get(name)
    if maker is None or not shares_memory(maker.op) or any(n not in values for n in maker.operands):
        return ""
    inner = view_texts(maker, makers, values)
    if maker.op in _IN_ORDER and not any(inner):
        return ""
    text = call_text(maker.first, inner)
    if len(maker.makes) == 1:
        return text
    return f"{text}[{[each.name for each in maker.makes].index(name)}]"


def exchange_text(kind: str, ranks: int) -> str:
    """A kind of exchange between so many ranks, such as "all_reduce of 2"."""
    return f"{kind} of {ranks}"


def _text(arg: Argument, operands: tuple[str, ...]) -> str:
    match arg:
        case Operand(index=index):
            return operands[index]
        case Token(kind=kind, name=name):
            return f"{kind}:{name}"
        case PerMicroBatch(values=values):
            return _text(values[0], operands)
        case tuple():
            return f"[{', '.join(_text(part, operands) for part in arg)}]"
    return repr(arg)


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
        # For each call that was met, with it: the same ones are in several plans of a rank.
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
            # Everything is read once, target and states are written.
            touched = (node.target, node.target, node.source, *node.states, *node.states)
            moved = Bytes(sum(values[name].nbytes for name in touched))
            return self._costs.of_update(home, node.rule, moved, together)
        met = self._met.get((id(node), home))
        if met is None:
            lies = view_texts(node, makers, values)
            key = home, node.first, lies
            if key not in self._known:
                self._known[key] = self._costs.of_call(*key)
            met = self._met[id(node), home] = node, self._known[key]
        return met[1]

    def exchange(self, joined: Sequence[Exchange], rank: int = 0) -> Seconds:
        """Seconds of collectives, or of a transfer, that run as one."""
        return self.communication(joined, rank).seconds

    def communication(self, joined: Sequence[Exchange], rank: int = 0) -> Cost:
        """The cost of collectives, or of a transfer, that run as one, as a rank sees it."""
        first = joined[0]
        moved = Bytes(sum(map(self._moved, joined)))
        if isinstance(first, Transfer):
            sent = [piece for each in joined for piece in transfer_pieces(each, rank, self._ranks)]
            return self._costs.of_transfer(sent, moved)
        size = joined_size(joined)
        key = first.kind, first.communicator, size, moved
        found = self._exchanged.get(key)
        if found is None:
            family = self.families.get(first.communicator, (first.communicator,))
            groups = [self._ranks[one] for one in family if one in self._ranks]
            found = self._costs.of_collective(first.kind, size, moved, groups)
            self._exchanged[key] = found
        return found

    def _moved(self, node: Exchange) -> Bytes:
        """The bytes that a rank sends or receives, whichever is more."""
        if isinstance(node, Transfer):
            sides = ((node.input, node.sends), (node.output, node.receives))
            return max(_piece_bytes(value, pieces) for value, pieces in sides)
        return Bytes(node.bytes // len(self._ranks[node.communicator]))


def joined_size(joined: Sequence[Exchange]) -> Bytes:
    """Bytes of collectives that run as one: of each its larger side on a rank."""
    every = (each for each in joined if isinstance(each, Collective))
    sides = (each.output if each.kind == "all_gather" else each.input for each in every)
    return Bytes(sum(side.nbytes for side in sides))


def transfer_pieces(node: Exchange, rank: int, ranks: Mapping[int, Sequence[int]]) -> Sent:
    """The pieces of a transfer that a rank sends to others and receives from them; `ranks` of each communicator."""
    found: list[tuple[int, int, Bytes]] = []
    own = ranks.get(node.communicator, ())
    if isinstance(node, Transfer) and own:
        for value, pieces, out in (
            (node.input, node.sends, True),
            (node.output, node.receives, False),
        ):
            for peer, region in pieces:
                if own[peer] != rank:
                    ends = (rank, own[peer]) if out else (own[peer], rank)
                    found.append((*ends, _piece_bytes(value, ((peer, region),))))
    return found


def _piece_bytes(value: LocalValue | None, pieces: Sequence[Piece]) -> Bytes:
    size = 0 if value is None else ITEM_SIZE[value.dtype]
    return Bytes(sum(region_size(region) for _, region in pieces) * size)
