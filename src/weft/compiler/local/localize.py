"""One rank's view of a graph: local shapes, adapted arguments, boxing as collectives.

Before: a logical graph in which every value has a layout. After: the `LocalProgram` of one rank, in
the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from weft.boxing import steps
from weft.boxing.box_steps import step_groups, step_node
from weft.cached import cached_property
from weft.compiler.microbatch.facts import join_per_micro_batch
from weft.compiler.pass_cache import PassCache
from weft.compiler.signatures import axis_signatures, graph_halos, halos, tensor_steps
from weft.errors import InternalError
from weft.ir.arguments import applied
from weft.ir.logical import Box, Call, Input, LogicalGraph, Node, Output, Ref, Update, Value
from weft.ir.nodes import FORWARD, Phase
from weft.ir.plan import (
    Communicator,
    LocalCall,
    LocalInput,
    LocalNode,
    LocalOutput,
    LocalProgram,
    LocalUpdate,
    LocalValue,
    Transfer,
)
from weft.layout import Placement, Region
from weft.ops import OpCall, TensorSpec
from weft.ops import localize as localize_call
from weft.units import ITEM_SIZE


def localize(
    graph: LogicalGraph,
    rank: int,
    communicators: tuple[Communicator, ...],
    homes: Mapping[str, int] | None = None,
) -> LocalProgram:
    """The part of `graph` that `rank` runs: nodes on placements that hold it, its part of boxing between placements.

    Args:
        communicators: of all boxings of the graph.
        homes: the stages of variables by key, for the phases of updates.
    """
    return localize_all(graph, (rank,), communicators, homes)[rank]


def localize_all(
    graph: LogicalGraph,
    ranks: Iterable[int],
    communicators: tuple[Communicator, ...],
    homes: Mapping[str, int] | None = None,
    cache: PassCache = PassCache(),  # noqa: B008 (keeps nothing)
) -> dict[int, LocalProgram]:
    """The programs that some ranks run, as `localize` says; the cache has those of other graphs."""
    shared = Shared(
        graph,
        {c.ranks: c.id for c in communicators},
        graph.loop,
        node_phases(graph, homes or {}),
        [place_of(graph, node) for node in graph.nodes],
    )
    return {rank: cache.of(_program, _View(shared, graph, rank), at=rank) for rank in ranks}


def _nodes_for(view: _View) -> Iterator[tuple[Node, Phase]]:
    """The nodes that the program of a rank depends on, each with its phase, the last first.

    Work of other ranks matters only if boxing sends its result here.
    """
    shared, boxed = view.shared, set[str]()
    every = zip(view.graph.nodes, shared.phases, shared.places, strict=True)
    for node, phase, place in reversed(list(every)):
        match node:
            case Box(input=source, output=output):
                there = view.holds(source.name) or view.holds(output.name)
                if there or output.name in boxed:
                    boxed.add(source.name)
                    yield node, phase
            case Input(value=value) | Output(value=value):
                if view.holds(value.name):
                    yield node, phase
            case _:
                if place is None or view.rank in place.coordinates:
                    yield node, phase


def _program(view: _View) -> LocalProgram:
    graph = view.graph
    nodes = [
        view.noted(node, local if local.phase is phase else replace(local, phase=phase))
        for node, phase, place in zip(
            graph.nodes, view.shared.phases, view.shared.places, strict=True
        )
        if place is None or view.rank in place.coordinates
        for local in view.local_nodes(node, phase)
    ]
    inputs = tuple(
        LocalInput(view.value(node.value), node.role, node.key)
        for node in graph.of_kind(Input)
        if view.holds(node.value.name)
    )
    outputs = tuple(
        LocalOutput(view.name(node.value.name), node.key)
        for node in graph.of_kind(Output)
        if view.holds(node.value.name)
    )
    loop = frozenset(view.looped)
    parts = inputs, tuple(nodes), outputs
    return LocalProgram(view.rank, *parts, graph.micro_batches, loop, view.origins)


@final
@dataclass(eq=False)
class _View:
    """The state of the walk of one rank; equal where another graph has the same nodes there, that read the same.

    Attributes:
        aliases: values that are another value as it stands (hints, free boxing).
        fetched: for each value, its windows so far: what every rank reads -> name of this rank's
            window.
        looped: the local values that are made once per micro-batch.
        origins: values between two steps of a boxing, and windows: what they are forms of.
    """

    shared: Shared
    graph: LogicalGraph
    rank: int
    looped: set[str] = field(default_factory=set)
    origins: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    fetched: dict[str, dict[tuple[Region, ...], str]] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _View) and self._read == other._read

    @cached_property
    def _read(self) -> tuple[object, ...]:
        """All that the program depends on."""
        graph, shared = self.graph, self.shared
        here = list(_nodes_for(self))
        names = {name: graph.values[name] for node, _ in here for name in node.uses}
        made = [value.name for node, _ in here for value in node.makes]
        looped = [name for name in (*names, *made) if name in shared.loop]
        return here, names, looped, graph.micro_batches, shared.communicator_of

    def name(self, name: str) -> str:
        return self.aliases.get(name, name)

    def value(self, value: Value) -> LocalValue:
        shape = value.laid.local_shape(value.shape, self.rank)
        return LocalValue(value.name, shape, value.dtype)

    def holds(self, name: str) -> bool:
        """True if this rank is in the placement of a value."""
        return self.rank in self.graph.values[name].laid.placement.coordinates

    def noted(self, node: Node, local: LocalNode) -> LocalNode:
        """`local`, a part of `node`, whose results are noted when they are made once per micro-batch."""
        if isinstance(node, Call) and isinstance(local, Transfer):
            loop = not self.looped.isdisjoint(local.reads)  # border rows that the call reads
        else:
            loop = any(value.name in self.shared.loop for value in node.makes)
        if loop:
            self.looped.update([value.name for value in local.makes])
        return local

    def local_nodes(self, node: Any, phase: Phase) -> Iterator[LocalNode]:
        match node:
            case Box():
                yield from self._box(node)
            case Call(
                op="weft.hint" | "weft.use" | "weft.take",
                args=(Ref(name=name), *_),
                outputs=(Value(name=output),),
            ):
                self.aliases[output] = self.name(name)
            case Call():
                yield from self._call(node, phase)
            case Update():
                target = self.graph.producers[node.target.name]
                assert isinstance(target, Input)
                states = tuple(ref.name for ref in node.states)
                source = self.name(node.source.name)
                skip = self.name(node.skip.name) if node.skip else None
                name, key = node.target.name, target.key
                yield LocalUpdate(
                    *(node.rule, name, source, states, node.group, key, phase, skip),
                    takes=node.takes,
                )

    def _call(self, node: Call, phase: Phase) -> Iterator[LocalNode]:
        """The exchanges of border rows that no earlier call needed, and the call after them."""
        needed, names = halos(self.graph, node), []
        for name, halo in needed.items():
            known = self.fetched.setdefault(name, {})
            if halo.wanted not in known:
                output = known[halo.wanted] = f"{name}.halo{len(known)}"
                self.origins[output] = name
                communicator = self.shared.communicator_of[halo.group_of(self.rank)]
                yield halo.transfer(self.rank, communicator, self.name(name), output)
        for name in node.operands:
            wanted = needed[name].wanted if name in needed else None
            names.append(self.fetched[name][wanted] if wanted else self.name(name))
        yield self.shared.local_call(node, self.rank, names, phase)

    def _box(self, node: Box) -> Iterator[LocalNode]:
        source = self.graph.values[node.input.name]
        name, itemsize = self.name(source.name), ITEM_SIZE[source.dtype]
        if not (self.holds(source.name) or self.holds(node.output.name)):
            self.aliases[node.output.name] = name
            return
        ids = self.shared.communicator_of.__getitem__
        chain = steps(source.laid, node.output.laid, source.shape, itemsize)
        for number, step in enumerate(chain, 1):
            last = number == len(chain)
            made = node.output.name if last else f"{node.output.name}.{number}"
            local = step_node(step, name, made, source.shape, source.dtype, self.rank, ids)
            if local is not None:
                yield local
                name = made
                if not last:
                    self.origins[made] = node.output.name
        if name != node.output.name:
            self.aliases[node.output.name] = name


def node_phases(graph: LogicalGraph, homes: Mapping[str, int]) -> list[Phase]:
    """The phase of each node of a graph with boxing, in order.

    A boxing with several readers is the first one's; one for the caller is in the phase that makes its value.
    """
    found: dict[str, Phase] = {}

    def phase(node: Node) -> Phase:
        match node:
            case Call():
                return node.phase
            case Box(output=output):
                return found[output.name]
            case Update(target=target):
                variable = graph.producers[target.name]
                key = variable.key if isinstance(variable, Input) else ""
                return Phase(homes.get(key, 0), "backward")
        return FORWARD

    for node in reversed(graph.nodes):
        if isinstance(node, Box):
            readers = [n for n in graph.users[node.output.name] if not isinstance(n, Output)]
            maker: Node = node
            while isinstance(maker, Box):
                maker = graph.producers[maker.input.name]
            made = maker.phase if isinstance(maker, Call) else FORWARD
            found[node.output.name] = phase(readers[0]) if readers else made
    return [phase(node) for node in graph.nodes]


@final
@dataclass(slots=True)
class Shared:
    """The data that the walks of all ranks share.

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
        known = self.calls.setdefault((node.first, operands, results), {})
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
            outputs = tuple(
                LocalValue(value.name, spec.shape, spec.dtype) if value and spec else None
                for value, spec in zip(node.outputs, call.results, strict=True)
            )
            local = LocalCall(outputs=outputs, phase=phase, **applied(call, names))
            self.local_calls[key] = call, local
        return self.local_calls[key][1]

    def _checked(self, node: Call, rank: int) -> OpCall:
        """The call of a rank; the rule's idea of its results must be the layouts'."""
        call = localized_call(self.graph, node, rank)
        expected = tuple(
            value and TensorSpec(value.laid.local_shape(value.shape, rank), value.dtype)
            for value in node.outputs
        )
        if call.results != expected:
            raise InternalError(
                f"the rule of {node.op} gives rank {rank} {call.results}, its layouts say {expected}"
            )
        return call


def localized_call(graph: LogicalGraph, node: Call, rank: int) -> OpCall:
    """The local form of a call for `rank`; arguments that differ between micro-batches vary."""
    if not node.varyings:
        return _at_micro_batch(graph, node, rank, 0)
    every = [_at_micro_batch(graph, node, rank, micro) for micro in range(graph.micro_batches)]
    args = join_per_micro_batch(tuple(call.args for call in every))
    kwargs = join_per_micro_batch(tuple(call.kwargs for call in every))
    return replace(every[0], args=args, kwargs=kwargs)


def _at_micro_batch(graph: LogicalGraph, node: Call, rank: int, micro: int) -> OpCall:
    call = node.call.at(micro)
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
            return node.makes[0].laid.placement
        case Update(target=target):
            return graph.values[target.name].laid.placement
    return None


def communicators(graph: LogicalGraph) -> tuple[Communicator, ...]:
    """The communicators that the boxings of a graph need, in the order of their first use.

    The ranks that send are before those that receive, so that between two stages without common
    ranks forward and backward have communicators of their own and do not wait for each other.
    """
    every = dict.fromkeys(ranks for groups in _groups_at_once(graph) for ranks in groups)
    return tuple([Communicator(number, ranks) for number, ranks in enumerate(every)])


def families(
    graph: LogicalGraph, communicators: Sequence[Communicator]
) -> Mapping[int, tuple[int, ...]]:
    """For each communicator, by id, the communicators that run the same exchange at the same time, itself included.

    They are the groups of one step of boxing, which share the links between the ranks. A communicator with which
    several steps have different company is given the largest.
    """
    ids = {each.ranks: each.id for each in communicators}
    found: dict[int, tuple[int, ...]] = {}
    for groups in _groups_at_once(graph):
        family = tuple([ids[ranks] for ranks in groups])
        for id in family:
            if len(found.get(id, ())) < len(family):
                found[id] = family
    return found


def _groups_at_once(graph: LogicalGraph) -> Iterator[Sequence[tuple[int, ...]]]:
    """The groups of each step of boxing, and of each exchange of border rows; of steps on the same groups once."""
    seen = set()
    for step, _, _ in tensor_steps(graph):
        where = step.source.placement, step.target.placement, step.axis
        groups = () if where in seen else step_groups(step)
        if groups:
            seen.add(where)
            yield groups
    for halo, _ in graph_halos(graph):
        yield halo.groups
