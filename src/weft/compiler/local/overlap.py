"""Activations in parts of the batch: what one part exchanges is sent while the next part computes.

Before: a `LocalProgram`. After: the same results, but calls and collectives that rules can split along the batch run
for each part. Between two exchanges all parts have their turn, in order, so that the exchange of part i runs beside
the products of part i + 1 (as in Domino, Wang et al. 2024, arXiv 2409.15241, and Megatron-LM's overlap of tensor
parallelism). A value summed over the batch, such as a weight's gradient, is the sum of its parts; a call that cannot
be split reads its operands joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.context import Context, Options
from weft.compiler.microbatch.forms import even_signatures
from weft.compiler.schedule.bucket import bucket
from weft.compiler.schedule.draft import Bucket, PlanDraft
from weft.errors import RuleError
from weft.hardware.costs import Costs
from weft.hardware.durations import Durations
from weft.ir.arguments import applied
from weft.ir.logical import LogicalGraph
from weft.ir.plan import (
    Collective,
    Communicator,
    LocalCall,
    LocalInput,
    LocalNode,
    LocalProgram,
    LocalUpdate,
    LocalValue,
)
from weft.layout import Broadcast, Partial, Split
from weft.ops import OpCall, Signature, TensorSpec, localize
from weft.units import Bytes, Seconds, seconds_text

# Local parts of boxing: rules do not know them. Where the dimension stands that they change.
_BOXING: Mapping[str, int | None] = {"weft.keep": None, "weft.pad": 1}


def overlap(program: LocalProgram, context: Context) -> LocalProgram:
    """The program with its batch in as many parts as was decided by `best_cut`."""
    return in_parts(program, context.parts)


def in_parts(program: LocalProgram, parts: int) -> LocalProgram:
    """The program with its batch in parts."""
    if parts == 1:
        return program
    cutter = _PartsCutter(program.values, parts, Turns(parts))
    for item in batch_leaves(program, parts):
        cutter.cut_whole(item.value.name, 0)
    for node in program.nodes:
        cutter.add(node)
    for output in program.outputs:
        cutter.join(output.name)
    nodes, made = cutter.order.finished(), cutter.origins
    there = {value.name for node in nodes for value in node.makes}
    gone = program.origins.keys() - there - {item.value.name for item in program.inputs}
    kept = {name: origin for name, origin in program.origins.items() if name not in gone}
    return replace(program, nodes=nodes, origins={**kept, **made})


def exchanged_in_parts(program: LocalProgram, parts: int) -> Iterator[Collective]:
    """The exchanges of which each part of the batch would have its own."""
    cutter = _PartsCutter(program.values, parts, Turns(parts))
    cut = cutter.cut
    cut.update((leaf.value.name, 0) for leaf in batch_leaves(program, parts))
    for node in program.nodes:
        if isinstance(node, Collective) and cutter.exchanges_parts(node):
            cut[node.output.name] = cut[node.input.name]
            yield node
        elif isinstance(node, LocalCall) and not cut.keys().isdisjoint(node.operands):
            cut.update(cutter.dims(node))


def batch_leaves(program: LocalProgram, parts: int) -> Sequence[LocalInput]:
    """The entries of the batch that can be cut: those with as many samples as most of them have."""
    leaves = [each for each in program.inputs if each.role == "batch" and each.value.shape]
    sizes = Counter(each.value.shape[0] for each in leaves)
    size = max(sizes, key=lambda one: sizes[one], default=0)
    return [each for each in leaves if each.value.shape[0] == size > 0 == size % parts]


@final
@dataclass(slots=True)
class _PartsCutter:
    """Cuts one node after another.

    Attributes:
        cut: the values of which there are parts, and along which dimension.
        whole: those of them that there are as a whole too.
        order: the nodes in the turns of the parts.
        origins: of parts and of sums on the way, the values of the program.
        signatures: of the calls so far, by call and how its operands are cut.
    """

    values: Mapping[str, LocalValue]
    parts: int
    order: Turns
    cut: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    origins: dict[str, str] = field(default_factory=dict)
    signatures: dict[tuple[OpCall, tuple[int | None, ...]], Signature | None] = field(
        default_factory=dict
    )

    def add(self, node: LocalNode) -> None:
        if isinstance(node, Collective) and self.exchanges_parts(node):
            self.cut[node.output.name] = self.cut[node.input.name]
            pairs = zip(
                self._parts_of(node.input.name), self._parts_of(node.output.name), strict=True
            )
            moved = Bytes(node.bytes // self.parts)
            for turn, (before, after) in zip(self.order.turns, pairs, strict=True):
                turn.append(replace(node, input=before, output=after, bytes=moved))
            self.order.take()
        elif not isinstance(node, LocalCall) or not self._call(node):
            for name in sorted(node.reads):
                self.join(name)
            self.order.add_whole(node)

    def join(self, name: str) -> None:
        """Make a value whole of its parts, if it is not yet."""
        if name in self.cut and name not in self.whole:
            self.whole.add(name)
            refs = tuple(part.ref for part in self._parts_of(name))
            call = LocalCall.of("aten.cat.default", (refs, self.cut[name]), (self.values[name],))
            self.order.add_late(call)

    def cut_whole(self, name: str, dim: int) -> None:
        """Views of the parts of a value that there is as a whole."""
        if name in self.order.late_values:
            self.order.take()
        self.cut[name] = dim
        self.whole.add(name)
        for turn, part in enumerate(self._parts_of(name)):
            length = part.shape[dim]
            args = (self.values[name].ref, dim, turn * length, length)
            self.order.turns[turn].append(LocalCall.of("weft.slice", args, (part,)))

    def _parts_of(self, name: str) -> Iterator[LocalValue]:
        value, dim = self.values[name], self.cut[name]
        shape = (*value.shape[:dim], value.shape[dim] // self.parts, *value.shape[dim + 1 :])
        for turn in range(self.parts):
            part = replace(value, name=f"{name}.part{turn}", shape=shape)
            self.origins[part.name] = name
            yield part

    def exchanges_parts(self, node: Collective) -> bool:
        """True if the parts of a value are exchanged one by one."""
        changed = {
            "all_reduce": (),
            "all_to_all": (node.dim, node.split_dim),
        }.get(node.kind, (node.dim,))
        return (
            self.cut.get(node.input.name, node.dim) not in changed and node.input.name in self.cut
        )

    def _call(self, node: LocalCall) -> bool:
        names = node.operands
        if self.cut.keys().isdisjoint(names):
            return False
        if node.op in _BOXING:
            return self._boxing(node)
        call = node.first
        signature = self._signature(call, tuple([self.cut.get(name) for name in names]))
        if signature is None:
            return False
        if any(name in self.order.late_values for name in names):
            self.order.take()
        for name, sbp in zip(names, signature.operands, strict=True):
            if isinstance(sbp, Split) and name not in self.cut:
                self.cut_whole(name, sbp.dim)
        self._run(node, names, call, signature)
        return True

    def dims(self, node: LocalCall) -> dict[str, int]:
        """The dimensions along which a call of parts cuts its operands and results; {} where it runs whole."""
        if node.op in _BOXING:
            (name,), (made,), place = node.operands, node.makes, _BOXING[node.op]
            keeps = place is None or node.args[place] != self.cut[name]
            return {made.name: self.cut[name]} if keeps else {}
        signature = self._signature(
            node.first, tuple([self.cut.get(name) for name in node.operands])
        )
        if signature is None:
            return {}
        names = (*node.operands, *(value.name if value else "" for value in node.outputs))
        sbps = zip(names, (*signature.operands, *signature.results), strict=True)
        return {name: sbp.dim for name, sbp in sbps if name and isinstance(sbp, Split)}

    def _signature(self, call: OpCall, cut: tuple[int | None, ...]) -> Signature | None:
        key = call, cut
        if key not in self.signatures:
            self.signatures[key] = part_signature(call, cut, self.parts)
        return self.signatures[key]

    def _boxing(self, node: LocalCall) -> bool:
        """Apply a rank-local boxing to every part; False if it changes the dimension that is cut."""
        (name,), (made,) = node.operands, node.makes
        place = _BOXING[node.op]
        if place is not None and node.args[place] == self.cut[name]:
            return False
        self.cut[made.name] = self.cut[name]
        pairs = zip(self._parts_of(name), self._parts_of(made.name), strict=True)
        for turn, (before, after) in zip(self.order.turns, pairs, strict=True):
            args = (before.ref, *node.args[1:])
            turn.append(node.changed(args=args, outputs=(after,)))
        return True

    def _run(
        self, node: LocalCall, names: Sequence[str], call: OpCall, signature: Signature
    ) -> None:
        sums = []
        for value, sbp in zip(node.outputs, signature.results, strict=True):
            if value is not None and isinstance(sbp, Split):
                self.cut[value.name] = sbp.dim
            elif value is not None:
                sums.append(value)
        for number, turn in enumerate(self.order.turns):
            local = localize(call, signature, self.parts, number)
            reads = [
                f"{name}.part{number}" if isinstance(sbp, Split) else name
                for name, sbp in zip(names, signature.operands, strict=True)
            ]
            call_of_part = part_call(node, local, reads, number)
            for part, value in zip(call_of_part.makes, node.makes, strict=True):
                self.origins[part.name] = value.name
            turn.append(call_of_part)
        for total in sums:
            for add in sum_of_parts(total, self.parts):
                self.origins.update({v.name: total.name for v in add.makes if v is not total})
                self.order.add_late(add)


@final
@dataclass(slots=True)
class Turns:
    """Nodes in an order in which they may run.

    Attributes:
        turns: for each part, what runs in its turn before the next exchange.
        late: nodes that wait for the turns of all parts.
        late_values: their results.
        updates: written last, when all parts have read the variables.
    """

    parts: int
    nodes: list[LocalNode] = field(default_factory=list)
    turns: list[list[LocalNode]] = field(init=False)
    late: list[LocalNode] = field(default_factory=list)
    late_values: set[str] = field(default_factory=set)
    updates: list[LocalUpdate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = [[] for _ in range(self.parts)]

    def add_whole(self, node: LocalNode) -> None:
        """Add a node that runs once: now, or after what it waits for."""
        if isinstance(node, LocalUpdate):
            self.updates.append(node)
        elif node.reads & self.late_values:
            self.add_late(node)
        else:
            self.nodes.append(node)

    def add_late(self, node: LocalNode) -> None:
        """Add a node that runs when all parts had their turns."""
        self.late.append(node)
        self.late_values.update(value.name for value in node.makes)

    def take(self) -> None:
        """Let all parts have their turns, and then what waits for them."""
        for turn in self.turns:
            self.nodes += turn
            turn.clear()
        self.nodes += self.late
        self.late.clear()
        self.late_values.clear()

    def finished(self) -> tuple[LocalNode, ...]:
        """Everything."""
        self.take()
        return (*self.nodes, *self.updates)


def part_signature(call: OpCall, cut: Sequence[int | None], parts: int) -> Signature | None:
    """The signature along the batch under which operands are read as they are cut; None if there is none.

    Args:
        cut: for each operand the dimension along which it is cut; None for those that are whole.
    """
    try:
        fitting = [each for each in even_signatures(call, parts) if _fits(call, each, cut)]
    except RuleError:
        return None
    return min(fitting, key=lambda each: _summed(call, each), default=None)


def _fits(call: OpCall, signature: Signature, cut: Sequence[int | None]) -> bool:
    for sbp, dim in zip(signature.operands, cut, strict=True):
        if not isinstance(sbp, Split | Broadcast) or (dim is not None and sbp != Split(dim)):
            return False
    results = zip(signature.results, call.results, strict=True)
    if any(not isinstance(sbp, Split) and sbp != Partial("sum") for sbp, spec in results if spec):
        return False
    read = _elements(call.operands[i] for i, dim in enumerate(cut) if dim is not None)
    return _summed(call, signature) <= read


def _summed(call: OpCall, signature: Signature) -> int:
    """Elements of results that are sums over the batch: adding up the parts must not outweigh them."""
    pairs = zip(call.results, signature.results, strict=True)
    return _elements(spec for spec, sbp in pairs if spec and not isinstance(sbp, Split))


def _elements(specs: Iterable[TensorSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)


def part_call(node: LocalCall, call: OpCall, reads: Sequence[str], number: int) -> LocalCall:
    """The call that one part runs for a call of the batch."""
    outputs = tuple(
        None
        if old is None or spec is None
        else LocalValue(f"{old.name}.part{number}", spec.shape, spec.dtype)
        for old, spec in zip(node.outputs, call.results, strict=True)
    )
    return LocalCall(outputs=outputs, phase=node.phase, **applied(call, reads))


def sum_of_parts(total: LocalValue, parts: int) -> Iterator[LocalCall]:
    """Calls that add up to `total` what the parts make of it."""
    so_far, *rest = (replace(total, name=f"{total.name}.part{turn}") for turn in range(parts))
    for number, term in enumerate(rest, 1):
        last = number == len(rest)
        made = total if last else replace(total, name=f"{total.name}.sum{number}")
        args = (so_far.ref, term.ref)
        yield LocalCall.of("aten.add.Tensor", args, (made,))
        so_far = made


# So many parts are tried. Four hid more of a GPT's exchanges over 1 Gbit/s, but slowed down its
# products by as much: messages cost time of the same cores.
PARTS = 2
# A step must become so much shorter, and this much of it must be exchanged between calls.
WORTH = 0.95
NONE = Seconds(0.0)


@final
@dataclass(frozen=True)
class BatchCut:
    """Into how many parts the batch is cut, and the estimated seconds of a step in one part and in these.

    `weighed` is true if this was estimated; false if the batch may not be cut.
    """

    parts: int = 1
    whole: Seconds = NONE
    cut: Seconds = NONE
    weighed: bool = field(default=False, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for `explain`."""
        if self.parts == 1:
            return ()
        seconds = f"{seconds_text(self.cut)} instead of {self.whole * 1e3:.3g}"
        return (
            f"the batch in {self.parts} parts, whose exchanges overlap with products: {seconds}",
        )


def may_cut(graph: LogicalGraph, options: Options) -> bool:
    """True if the batch of a step may be cut: the step is not yet in parts otherwise, and all ranks are alike.

    Where all shards of a tensor have one shape, rules allow the same cuts on all ranks.
    """
    if graph.micro_batches > 1 or len(graph.placements) > 1 or options.offload:
        return False
    return all(value.is_even for value in graph.values.values())


def best_cut(
    program: LocalProgram,
    communicators: Sequence[Communicator],
    families: Mapping[int, Sequence[int]],
    costs: Costs,
    context: Context,
) -> BatchCut:
    """Into how many parts the batch is best cut: one or two."""
    durations = Durations(costs, communicators, families)
    # Parts hide only exchanges of parts: parameters are gathered, and gradients reduced, as wholes.
    exchanged = sum(
        durations.exchange([node], program.rank) for node in exchanged_in_parts(program, PARTS)
    )
    whole = _seconds(program, durations, context) if exchanged else NONE
    if exchanged <= (1 - WORTH) * whole or not batch_leaves(program, PARTS):
        return BatchCut(weighed=exchanged <= (1 - WORTH) * whole)
    cut = _seconds(in_parts(program, PARTS), durations, context)
    return BatchCut(PARTS, whole, cut, True) if cut < WORTH * whole else BatchCut(weighed=True)


def _seconds(program: LocalProgram, durations: Durations, context: Context) -> Seconds:
    """Seconds of a step in which each queue does one thing after another, in order; peers keep pace."""
    values, there, free = program.values, dict[str, float](), dict[str, float]()
    # Updates come last.
    schedule = bucket(PlanDraft(program), context).schedule
    for item in sorted(schedule, key=lambda each: isinstance(each, LocalUpdate)):
        queue, seconds = "compute", 0.0
        if isinstance(item, Bucket):
            queue = str(item.collectives[0].communicator)
            seconds = durations.exchange(item.collectives, program.rank)
        else:
            seconds = durations.node(item, values, program.rank)
        start = max(there.get(name, 0.0) for name in (*item.reads, "")) if item.reads else 0.0
        end = max(start, free.get(queue, 0.0)) + seconds
        free[queue] = end
        there.update((value.name, end) for value in item.makes)
    return Seconds(max(free.values(), default=0.0))
