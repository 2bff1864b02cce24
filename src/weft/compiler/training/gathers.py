"""Find where a parameter that is sharded becomes whole, or a whole one is cut, and for which readers.

Before: calls read a parameter, or views and casts of it. After: each group of readers has a chain
of its own, in which a hint says from where on the parameter is whole; deduction puts the all-gather
there:

    %w.cast0 = aten._to_copy(%w, …)            a cast works on the shard: fewer bytes are sent
    %w.take0 = weft.take(%w.cast0) hint(S(0))  where each group has a gather of its own
    %w.hint0 = weft.hint(%w.take0) hint(B)
    %w.t0    = aten.t(%w.hint0)                a view of the whole

Casts run once a step, at its start: made where they are read, after the work before it, they would
hold their gather back until that is done, and there would be one for each group and micro-batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from weft.ir.logical import (
    Arg,
    Call,
    Hint,
    Input,
    LogicalGraph,
    Node,
    PerMicroBatch,
    Phase,
    Ref,
    runs_in_loop,
)
from weft.ir.nodes import HINT, TAKE, renamed
from weft.ops import shares_memory

# Conversions: of a shard they make the shard.
_CASTS = frozenset(("aten._to_copy.default", "prims.convert_element_type.default"))


@final
@dataclass(frozen=True)
class Gather:
    """A gather of one parameter for its readers, or the cut of one that is whole.

    Attributes:
        shard: how it is stored, for each stage; of use where it is gathered each time.
        whole: how it is used, for each stage.
        each_time: true if the readers in one block and phase gather it for themselves, in each micro-batch, together
            with what else the block reads; otherwise it is gathered once a step for all readers of a stage.
    """

    shard: tuple[Hint, ...]
    whole: tuple[Hint, ...]
    each_time: bool

    def group(self, reader: Call) -> Hashable:
        """Readers of one group share a gather: those of a block ("blocks.0") in one phase."""
        if not self.each_time:
            return reader.phase.stage
        return reader.phase, block_of(reader.module)


def block_of(module: str) -> str:
    """The repeated block around a module ("blocks.0" for "blocks.0.fc"), or its outermost module."""
    parts = module.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def gather_parameters(
    graph: LogicalGraph, gathers: Mapping[str, Gather], turning: int | None = None
) -> LogicalGraph:
    """Give the readers of some parameters, named by their values, chains as above.

    Args:
        turning: the stage in which the backward of a micro-batch follows its forward at once, if any. If that of a
            block follows with no other block between, as that of the last one does, both share what is gathered. In
            other stages it would stay for as long as the micro-batch is in flight, and keep the next one from its own.
    """
    rewriter = _GatherRewriter(graph, gathers, turning)
    for node in graph.nodes:
        rewriter.note(node)
    for node in graph.nodes:
        rewriter.add(node)
    read: set[str] = set()
    kept: list[Node] = []
    for node in reversed(rewriter.nodes()):
        # A call of a chain that nobody reads goes.
        name = node.output_names[0] if isinstance(node, Call) and node.outputs else ""
        if name not in rewriter.chain or name in read:
            read.update(node.uses)
            kept.append(node)
    return graph.with_nodes(reversed(kept))


@final
@dataclass(slots=True)
class _GatherRewriter:
    """The state of the walk.

    Attributes:
        root: for each value of a chain, its parameter; the parameters included.
        chain: for each value of a chain but the parameter, the call that makes it.
        made: by group and value, what stands for it: its shard and the whole.
        joined: for a group, the one whose gathers it shares: for the backward of a block that
            follows its forward at once, the forward's.
        last: by stage the group that was read last, and whether for each micro-batch.
        early: new nodes that run once a step, before all others.
        wanted: by group, the values of chains and their readers, where a group is gathered
            together.
        whole: blocks with parameters, none of which is gathered each time.
    """

    graph: LogicalGraph
    gathers: Mapping[str, Gather]
    turning: int | None
    root: dict[str, str] = field(default_factory=dict)
    chain: dict[str, Call] = field(default_factory=dict)
    made: dict[tuple[Hashable, str, str], str] = field(default_factory=dict)
    joined: dict[Hashable, Hashable] = field(default_factory=dict)
    last: dict[int, tuple[Hashable, bool]] = field(default_factory=dict)
    early: list[Node] = field(default_factory=list)
    body: list[Node] = field(default_factory=list)
    wanted: dict[Hashable, list[tuple[str, Call]]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    count: int = 0
    loop: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.root.update((name, name) for name in self.gathers)
        self.loop = set(self.graph.loop)
        blocks: dict[bool, set[str]] = {True: set(), False: set()}
        for node in self.graph.of_kind(Input):
            if node.role == "parameter":
                gather = self.gathers.get(node.value.name)
                blocks[gather is not None and gather.each_time].add(block_of(node.key))
        self.whole = frozenset(blocks[False] - blocks[True]) if blocks[True] else frozenset()

    def nodes(self) -> list[Node]:
        """Inputs, what is gathered before the micro-batches, and the rest."""
        inputs = sum(isinstance(node, Input) for node in self.body)
        return [*self.body[:inputs], *self.early, *self.body[inputs:]]

    def note(self, node: Node) -> None:
        """Find the chains and their readers."""
        if isinstance(node, Call) and self._continues(node):
            source, made = node.operands[0], node.makes[0].name
            self.root[made], self.chain[made] = self.root[source], node
        elif isinstance(node, Call):
            for name in self._read(node):
                gather = self.gathers[self.root[name]]
                if gather.each_time:
                    group = gather.group(node)
                    now = group, runs_in_loop(node, self.loop)
                    last, looped = self.last.get(node.phase.stage, now)
                    if group not in self.joined:
                        # The backward of a block that follows its forward at once joins it.
                        self.joined[group] = group
                        match group, last:
                            case (Phase(at, "backward"), str(one)), (
                                Phase(there, "forward"),
                                str(same),
                            ):
                                turns = at == there == self.turning and looped == now[1]
                                self.joined[group] = last if turns and one == same else group
                    self.last[node.phase.stage] = now
                    self.wanted.setdefault(self._group(name, node), []).append((name, node))
            # A block whose parameters are whole is between the backward of those around it and their forward.
            block = block_of(node.module)
            if block in self.whole:
                self.last[node.phase.stage] = (node.phase, block), runs_in_loop(node, self.loop)

    def _group(self, name: str, reader: Call) -> Hashable:
        """The group of the readers with which one shares its gathers."""
        group = self.gathers[self.root[name]].group(reader)
        return self.joined.get(group, group)

    def add(self, node: Node) -> None:
        if isinstance(node, Call) and not self._continues(node):
            names = self._read(node)
            groups = dict.fromkeys(self._group(name, node) for name in names)
            for group in groups:
                for name, reader in self.wanted.pop(group, ()):
                    while not self._is_shard(name):
                        name = self._source(name)
                    self._whole(name, reader)
            node = renamed(node, {name: self._whole(name, node) for name in names})
        self.body.append(node)

    def _read(self, node: Call) -> tuple[str, ...]:
        return tuple(name for name in dict.fromkeys(node.uses) if name in self.root)

    def _continues(self, node: Call) -> bool:
        names = node.operands
        cheap = (
            (shares_memory(node.op) or node.op in _CASTS)
            and node.op != HINT
            and len(node.outputs) == 1
        )
        return cheap and len(names) == 1 and names[0] in self.root

    def _whole(self, name: str, reader: Call) -> str:
        """The name that stands for the whole of a value of a chain, for a reader."""
        gather, stage = self.gathers[self.root[name]], reader.phase.stage
        if not self._is_shard(name):
            source = self._whole(self._source(name), reader)
            key = (self._group(name, reader), "whole", name)
            if key not in self.made:
                self.made[key] = self._copy(name, "whole", source, reader)
            return self.made[key]
        ref = self._ref(name, self._stored(name, reader))
        if gather.each_time:
            every = PerMicroBatch(tuple(range(self.graph.micro_batches)))
            vary = (every,) if runs_in_loop(reader, self.loop) else ()
            taken = self._new(name, TAKE, reader, (ref, *vary), gather.shard[stage])
            ref = self._ref(name, taken)
        return self._new(name, HINT, reader, (ref,), gather.whole[stage])

    def _stored(self, name: str, reader: Call) -> str:
        if name not in self.chain:
            return name
        key = (reader.phase.stage, "shard", name)
        if key not in self.made:
            source = self._stored(self._source(name), reader)
            self.made[key] = self._copy(name, "shard", source, reader, early=True)
        return self.made[key]

    def _is_shard(self, name: str) -> bool:
        if name not in self.chain:
            return True
        return self.chain[name].op in _CASTS and self._is_shard(self._source(name))

    def _ref(self, name: str, form: str) -> Ref:
        return replace(self.graph.values[name].ref, name=form)

    def _source(self, name: str) -> str:
        return self.chain[name].operands[0]

    def _new(self, name: str, op: str, reader: Call, args: tuple[Arg, ...], hint: Hint) -> str:
        """A hint on the shard that stands for `name`, or a take of it; one a group."""
        kind = op.removeprefix("weft.")
        key = (self._group(name, reader), kind, name)
        if key not in self.made:
            value = replace(self.graph.values[name], name=self._name(name, kind))
            self._append(Call.of(op, args, (value,), location=reader.location, hint=hint), reader)
            self.made[key] = value.name
        return self.made[key]

    def _copy(self, name: str, kind: str, source: str, reader: Call, early: bool = False) -> str:
        """A copy of the call of a chain that makes `name`, on another source."""
        value = replace(self.graph.values[name], name=self._name(name, kind))
        copy = self.chain[name].changed(outputs=(value,), location=reader.location)
        self._append(renamed(copy, {self._source(name): source}), reader, early)
        return value.name

    def _append(self, call: Node, reader: Call, early: bool = False) -> None:
        assert isinstance(call, Call)
        early |= self.graph.micro_batches > 1 and not runs_in_loop(call, self.loop)
        call = call.changed(phase=reader.phase)
        if runs_in_loop(reader, self.loop) and not early:
            self.loop.add(call.makes[0].name)
        (self.early if early else self.body).append(call)

    def _name(self, name: str, kind: str) -> str:
        self.count += 1
        return f"{name}.{kind}{self.count}"
