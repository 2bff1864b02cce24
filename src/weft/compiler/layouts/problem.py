"""The deduction as a problem over variables: what can choose a signature, and where boxing may be between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, final

from weft.compiler.hints import Hints, Thin, hinted_sbps, is_hint
from weft.compiler.layouts.empty_shards import ThinSplits, splits_with_empty_shards
from weft.compiler.layouts.intent import Intents, Storage, intents
from weft.errors import LayoutError
from weft.ir.logical import Call, Input, LogicalGraph, Node, Output, Update
from weft.layout import SBP, Broadcast, Partial, Placement, Split
from weft.ops import OpCall, Signature, TensorSpec

_NOWHERE: Thin = frozenset()


@final
class OpChoice(NamedTuple):
    """A call of an op: chooses among the signatures of its rule.

    `thin` says of each operand, then of each result, where its splits may leave ranks empty;
    `times` how often the call runs in a step; `pinned` the signatures that the user fixed, one for
    each axis.
    """

    call: OpCall
    node: Call
    thin: tuple[Thin, ...] = ()
    times: int = 1
    pinned: tuple[Signature, ...] = ()


@final
class FreeVariable(NamedTuple):
    """A variable with its own list of signatures for each axis.

    An input's signature is (its SBP) -> (its SBP): what comes in as its operand is its new version
    from an update. A hint passes its value through; an output takes it as Broadcast.

    Attributes:
        choices: for each axis, the signatures to choose from; those that leave ranks empty are
            passed over, except where `thin` allows them.
        prefer_broadcast: true if a Split needs a better reason than a tie.
        thin: where splits of the tensor may leave ranks empty.
        sent: true if it comes from another stage: every copy of it is sent.
        fed: true if it is an entry of the batch: every copy of it is held.
    """

    spec: TensorSpec
    choices: tuple[tuple[Signature, ...], ...]
    prefer_broadcast: bool = False
    thin: Thin = _NOWHERE
    sent: bool = False
    fed: bool = False


@final
class SharedBoxing(NamedTuple):
    """The layout to which a value with several readers is boxed once for all of them."""

    spec: TensorSpec
    value: str
    thin: Thin = _NOWHERE


Variable: TypeAlias = OpChoice | FreeVariable | SharedBoxing


@final
class ReadEdge(NamedTuple):
    """A tensor that goes from result `result` of variable `source` to operand `operand` of variable `target`.

    `intents` says for each axis what the edge is charged for beside its boxing; empty if for
    nothing. `times` says how often the tensor is made, and boxed, in a step.
    """

    source: int
    result: int
    target: int
    operand: int
    spec: TensorSpec
    intents: Intents = ()
    times: int = 1


@final
@dataclass
class Problem:
    """Variables and edges of a graph.

    Attributes:
        maker_of: for each value, the variable and result that decide its layout.
        intents: for each value that carries a parameter or a gradient, what its edges are charged
            for.
        thin: for each value where its splits may leave ranks empty.
        loop: values that are made for each of `micro_batches` micro-batches.
    """

    variables: list[Variable] = field(default_factory=list)
    edges: list[ReadEdge] = field(default_factory=list)
    maker_of: dict[str, tuple[int, int]] = field(default_factory=dict)
    variable_of: dict[int, int] = field(default_factory=dict)
    share_of: dict[str, int] = field(default_factory=dict)
    intents: dict[str, Intents] = field(default_factory=dict)
    thin: ThinSplits = field(default_factory=dict)
    loop: frozenset[str] = frozenset()
    micro_batches: int = 1

    def times(self, name: str) -> int:
        """The number of times that a value is made in a step."""
        return self.micro_batches if name in self.loop else 1

    def of(self, free: Storage) -> frozenset[int]:
        """The variables that decide how some values are made, or boxed for their readers."""
        made = {self.maker_of[name][0] for name in free.made}
        return frozenset(made | {self.share_of[name] for name in free.read & self.share_of.keys()})

    def add(self, variable: Variable) -> int:
        self.variables.append(variable)
        return len(self.variables) - 1

    def read(self, name: str, target: int, operand: int, spec: TensorSpec) -> None:
        """Let operand `operand` of `target` read the value `name`, from its Share if it has one."""
        source, result = self.maker_of[name]
        if name in self.share_of:
            source, result = self.share_of[name], 0
        intents = self.intents.get(name, ())
        self.edges.append(
            ReadEdge(source, result, target, operand, spec, intents, self.times(name))
        )


def build(
    graph: LogicalGraph,
    hints: Hints,
    placement: Placement,
) -> Problem:
    """The problem of a graph without layouts.

    Raises:
        LayoutError: when a hint does not fit the value.
    """
    updated = (u.target.name for u in graph.of_kind(Update) if not u.elementwise)
    hinted = (node.value.name for node in graph.of_kind(Input) if node.key in hints.whole)
    # For each optimizer state that has the shape of its parameter: the parameter whose layout it shares.
    owners = {
        state.name: update.target.name
        for update in graph.of_kind(Update)
        for state in update.states
        if update.elementwise
        and graph.values[state.name].shape == graph.values[update.target.name].shape
    }
    whole = frozenset((*updated, *hinted))
    thin = splits_with_empty_shards(graph, hints, placement)
    problem = Problem(
        intents=intents(graph, hints, placement.axes),
        thin=thin,
        loop=graph.loop,
        micro_batches=graph.micro_batches,
    )
    # Nodes that may want each value boxed; an update's target and states stay in place.
    readers = dict.fromkeys(graph.values, 0) | {
        name: sum(not isinstance(n, Update) or n.source.name == name for n in nodes)
        for name, nodes in graph.users.items()
    }
    for name in hints.leaving:
        readers[name] += 1
    for number, node in _inputs_first(graph, owners):
        if isinstance(node, Input):
            owner = owners.get(node.value.name)
            if owner is not None:
                problem.maker_of[node.value.name] = problem.maker_of[owner]
                continue
            variable: Variable = _input(node, hints, placement, whole, thin)
        elif isinstance(node, Call):
            variable = _call(node, placement, problem, hints)
        elif isinstance(node, Output):
            variable = FreeVariable(
                graph.values[node.value.name].spec,
                ((Signature((Broadcast(),), ()),),) * placement.axes,
            )
        else:
            if isinstance(node, Update):  # its source goes to the layout of its target
                target, _ = problem.maker_of[node.target.name]
                problem.read(node.source.name, target, 0, graph.values[node.source.name].spec)
            continue
        problem.variable_of[number] = problem.add(variable)
        _connect(problem, graph, number, node, readers)
    for name in sorted(hints.leaving):
        spec = graph.values[name].spec
        leaves = problem.add(
            FreeVariable(spec, (_whole(spec),) * placement.axes, thin=thin.get(name, _NOWHERE))
        )
        problem.read(name, leaves, 0, spec)
    return problem


def _connect(
    problem: Problem, graph: LogicalGraph, number: int, node: Node, readers: Mapping[str, int]
) -> None:
    here = problem.variable_of[number]
    if isinstance(node, Call):
        for operand, (name, spec) in enumerate(
            zip(node.operands, node.first.operands, strict=True)
        ):
            problem.read(name, here, operand, spec)
    elif isinstance(node, Output):
        problem.read(node.value.name, here, 0, graph.values[node.value.name].spec)
    results = node.outputs if isinstance(node, Call) else node.makes
    for result, value in enumerate(results):
        if value is not None:
            problem.maker_of[value.name] = (here, result)
            if readers[value.name] > 1:
                share = problem.add(
                    SharedBoxing(value.spec, value.name, problem.thin.get(value.name, _NOWHERE))
                )
                problem.read(value.name, share, 0, value.spec)
                problem.share_of[value.name] = share


def _inputs_first(graph: LogicalGraph, owners: Mapping[str, str]) -> Iterator[tuple[int, Node]]:
    """All nodes with their numbers; optimizer states after the parameters that they follow."""
    late = []
    for number, node in enumerate(graph.nodes):
        if isinstance(node, Input) and node.value.name in owners:
            late.append((number, node))
            continue
        if not isinstance(node, Input):
            yield from late
            late = []
        yield number, node
    yield from late


def _call(node: Call, placement: Placement, problem: Problem, hints: Hints) -> Variable:
    call = node.first
    made = node.output_names
    thin = problem.thin
    ports = tuple([thin.get(name, _NOWHERE) for name in (*node.operands, *made)]) if thin else ()
    if not is_hint(node):
        times = max(map(problem.times, made))
        pinned = hints.signatures.get(node.makes[0].name, ()) if node.makes else ()
        expected = len(call.operands), len(call.results)
        for one in pinned:
            if (len(one.operands), len(one.results)) != expected:
                raise LayoutError(
                    f"signatures={{{node.makes[0].name!r}: …}} fixes {one} for {node.op}; give one SBP for each "
                    f"tensor, operands: {expected[0]}, results: {expected[1]}"
                )
        return OpChoice(call, node, ports if any(ports) else (), times, pinned)
    choices = (
        (*_whole(call.operands[0]), _same(Partial())) if sbp is None else (_same(sbp),)
        for sbp in hinted_sbps(node, placement)
    )
    return FreeVariable(call.operands[0], tuple(choices), thin=thin.get(node.operands[0], _NOWHERE))


def _whole(spec: TensorSpec) -> tuple[Signature, ...]:
    """An axis of a value that is no part of a sum."""
    splits = [Split(dim) for dim in range(len(spec.shape))]
    sbps: tuple[SBP, ...] = (Broadcast(), *splits)
    return tuple(map(_same, sbps))


def _input(
    node: Input,
    hints: Hints,
    placement: Placement,
    whole: Collection[str],
    thin: ThinSplits,
) -> FreeVariable:
    first, dims = int(node.cut), range(len(node.value.shape))
    by_role = {"parameter": dims, "buffer": dims, "batch": dims[first : first + 1]}
    free: tuple[SBP, ...] = (Broadcast(), *map(Split, by_role.get(node.role, ())))
    hinted = hints.inputs.get(node.key, (None,) * placement.axes)
    if node.value.name in whole:
        hinted = (Broadcast(),) * placement.axes
    choices = [tuple(map(_same, free if fixed is None else (fixed,))) for fixed in hinted]
    prefer = node.role in ("parameter", "buffer")
    allowed = thin.get(node.value.name, _NOWHERE)
    sent, fed = node.sent is not None, node.role == "batch"
    return FreeVariable(node.value.spec, tuple(choices), prefer, allowed, sent, fed)


def _same(sbp: SBP) -> Signature:
    return Signature((sbp,), (sbp,))
