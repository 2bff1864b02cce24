"""The values of a step in micro-batches, in the forms in which its calls want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.microbatch.facts import Facts, sum_of_leaf
from weft.compiler.microbatch.forms import Form, Own, Source, Strided, even_signatures, micro_call
from weft.errors import StrategyError
from weft.ir.logical import Arg, Call, LogicalGraph, Ref, Value
from weft.ir.nodes import FORWARD, PerMicroBatch, Phase
from weft.layout import SBP, Broadcast, Partial, Split
from weft.ops import Signature
from weft.ops.rule import rule_of

# What makes of a leaf that is cut the part of one micro-batch.
SELECT = "aten.select.int"


@final
@dataclass
class Values:
    """The values that have been made so far; `read` makes those that are missing.

    Attributes:
        forms: how each value of `graph` is made; one made from nothing has no entry.
        made: the new values by the old one's name, their form, and the stage that they are for
            (None for all).
    """

    graph: LogicalGraph
    micro_batches: int
    facts: Facts
    forms: dict[str, Form] = field(default_factory=dict)
    made: dict[tuple[str, Form, int | None], Value] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _given: set[str] = field(default_factory=set)
    _makable: dict[tuple[str, SBP], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names.update(self.graph.values)

    def note(self, name: str, form: Form, value: Value, stage: int | None = None) -> None:
        """`value` is what `name` is in this form; that it is first noted in is how it is made."""
        self.made[name, form, stage] = value
        if stage is None:
            self.forms.setdefault(name, form)

    def source(self, name: str, phase: Phase) -> Source:
        """The facts that a call of `phase` needs of a value that it reads."""
        spec = self.graph.values[name].spec
        if name in self.facts.nothing:
            dims = (dim for dim in range(len(spec.shape)) if self._can_make(name, Split(dim)))
            return Source(spec, None, pieces=frozenset(dims))
        form = self.forms[name]
        ready = (name, Broadcast(), None) in self.made
        crosses = self._home(name).stage != phase.stage
        if isinstance(form, Partial) and (ready or crosses):
            form = Broadcast()  # a sum is accumulated once, and before it crosses to another stage
        return Source(spec, form, whole=name in self.facts.whole, ready=ready)

    def operand(self, name: str, form: Form, phase: Phase) -> Value:
        """The value that a call reads to have an operand in a form; `Own` stands for Broadcast."""
        own = self.forms.get(name) == Own() and form == Broadcast()
        return self.read(name, Own() if own else form, phase)

    def read(self, name: str, form: Form, phase: Phase = FORWARD) -> Value:
        """The value `name` of the whole-batch graph in a form, for a reader in `phase`."""
        for stage in (None, phase.stage):
            if (name, form, stage) in self.made:
                return self.made[name, form, stage]
        match form:
            case Split():
                return self._piece(name, form, phase)
            case Strided():
                return self._pieces(name, form, phase)
            case Broadcast():
                return self._whole(name, phase)
            case Partial():
                return self._average(name, form)
            case Own():
                every = (self._ref(name), self._varying(1))
                return self._converted(name, "use", "weft.use", every, form, phase)

    def _ref(self, name: str) -> Ref:
        """An argument that is a value as it is made: a leaf in parts, what is its own of each micro-batch."""
        value = self.graph.values[name]
        if name in self.facts.leaves:
            parts = (self.micro_batches, value.shape[0] // self.micro_batches)
            return replace(value, shape=(*parts, *value.shape[1:])).ref
        return value.ref

    def _varying(self, step: int) -> PerMicroBatch:
        return PerMicroBatch(tuple(step * m for m in range(self.micro_batches)))

    def _piece(self, name: str, form: Split, phase: Phase) -> Value:
        """A part for each micro-batch: of a leaf, made as a part, or cut from the whole."""
        if name in self.facts.leaves and form.dim == 0:
            every = (self._ref(name), 0, self._varying(1))
            return self._converted(name, "micro", SELECT, every, form, phase)
        if name in self.facts.nothing and self._can_make(name, form):
            return self._again(name, form, phase)
        whole = self.operand(name, Broadcast(), phase)
        length = whole.shape[form.dim] // self.micro_batches
        args = (whole.ref, form.dim, self._varying(length), length)
        return self._converted(name, "micro", "weft.slice", args, form, phase)

    def _pieces(self, name: str, form: Strided, phase: Phase) -> Value:
        """For each micro-batch its part of every block, cut from the whole."""
        whole, dim = self.operand(name, Broadcast(), phase), form.dim
        shape, outer = whole.shape, form.outer
        blocks = (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
        viewed = self._viewed(whole, blocks, name, phase)
        length = blocks[dim + 1] // self.micro_batches
        cut = (*blocks[: dim + 1], length, *shape[dim + 1 :])
        args = (viewed.ref, dim + 1, self._varying(length), length)
        part = self._new(name, "micro", "weft.slice", args, cut, phase)
        made = self._viewed(part, self._shape(self.graph.values[name], form), name, phase)
        self.note(name, form, made, phase.stage)
        return made

    def _packed(self, name: str, form: Strided, read: Value) -> Value:
        old, dim, home = self.graph.values[name], form.dim, self._home(name)
        blocks = (*old.shape[:dim], form.outer, read.shape[dim] // form.outer)
        rest = old.shape[dim + 1 :]
        viewed = self._viewed(read, (*blocks, *rest), name, home)
        whole = (*blocks[:-1], blocks[-1] * self.micro_batches, *rest)
        packed = self._new(name, "all", "weft.pack", (viewed.ref, dim + 1), whole, home)
        made = self._viewed(packed, old.shape, name, home)
        self.note(name, Broadcast(), made)
        return made

    def _whole(self, name: str, phase: Phase) -> Value:
        if name in self.facts.leaves:
            args = (self._ref(name), self.graph.values[name].shape)
            return self._converted(name, "whole", "aten.reshape.default", args, Broadcast(), phase)
        if name in self.facts.nothing or name in self.facts.whole:
            return self._summed(name, phase) or self._again(name, Broadcast(), phase)
        form = self.forms[name]
        if isinstance(form, Split | Strided) and self._is_view(name):
            # What it views may be wanted whole as well, and is packed once for both.
            return self._again(name, Broadcast(), self._home(name), None)
        read = self.read(name, Partial() if form == Own() else form, phase)
        if isinstance(form, Strided):
            return self._packed(name, form, read)
        how: Arg = form.reduction if isinstance(form, Partial) else "sum"
        op, how = ("weft.pack", form.dim) if isinstance(form, Split) else ("weft.accumulate", how)
        every = (read.ref, how)
        return self._converted(name, "all", op, every, Broadcast(), self._home(name), None)

    def _summed(self, name: str, phase: Phase) -> Value | None:
        """A sum over a leaf, of the leaf as it is cut; None when `name` is no such sum."""
        found = sum_of_leaf(self.graph, name, self.facts.leaves)
        if found is None:
            return None
        leaf, calls = found
        old = self.graph.values[leaf]
        shape = (self.micro_batches, old.shape[0] // self.micro_batches, *old.shape[1:])
        args = (self._ref(leaf), shape)
        made = self._new(leaf, "parts", "aten.reshape.default", args, shape, phase)
        for call in calls:
            (value,) = call.makes
            whole = replace(
                value,
                name=self._copy_name(value.name),
                shape=() if call is calls[-1] else shape,
            )
            kind = Phase(phase.stage, call.phase.kind)
            self.calls.append(call.on(made).changed(outputs=(whole,), phase=kind))
            made = whole
        self.note(name, Broadcast(), made, phase.stage)
        return made

    def _average(self, name: str, form: Partial) -> Value:
        value = self.read(name, Own())
        if form != Partial() or "float" not in value.dtype:
            raise StrategyError(
                f"%{name} ({value.dtype}) has a value for each micro-batch, of which the step "
                "wants one; only of floating-point values the mean is taken. Leave micro_batches "
                "out, or do not return it"
            )
        args = (value.ref, 1 / self.micro_batches)
        return self._converted(name, "mean", "aten.mul.Tensor", args, form, self._home(name), None)

    def _converted(
        self,
        name: str,
        suffix: str,
        op: str,
        args: tuple[Arg, ...],
        form: Form,
        phase: Phase,
        stage: int | None = -1,
    ) -> Value:
        """Add a call that makes another form of a value; by default for the stage of `phase`."""
        shape = self._shape(self.graph.values[name], form)
        made = self._new(name, suffix, op, args, shape, phase)
        self.note(name, form, made, phase.stage if stage == -1 else stage)
        return made

    def _viewed(self, value: Value, shape: tuple[int, ...], name: str, phase: Phase) -> Value:
        return self._new(name, "blocks", "aten.reshape.default", (value.ref, shape), shape, phase)

    def _new(
        self,
        name: str,
        suffix: str,
        op: str,
        args: tuple[Arg, ...],
        shape: tuple[int, ...],
        phase: Phase,
    ) -> Value:
        """Add a call that makes something of a value of the old graph, called after it."""
        producer = self.graph.producers[name]
        made = Value(self._fresh(f"{name}.{suffix}"), shape, self.graph.values[name].dtype)
        location = producer.location if isinstance(producer, Call) else None
        self.calls.append(Call.of(op, args, (made,), location=location, phase=phase))
        return made

    def _is_view(self, name: str) -> bool:
        node = self._producer(name)
        operands = node.operands
        size = prod(self.graph.values[name].shape)
        return (
            len(operands) == 1
            and rule_of(node.first).view
            and prod(self.graph.values[operands[0]].shape) == size
        )

    def _again(self, name: str, form: SBP, phase: Phase, stage: int | None = -1) -> Value:
        """Make a value in a form in which its operands can be made as well."""
        stage = phase.stage if stage == -1 else stage
        node = self._producer(name)
        signature = next(self._makers(node, name, form))
        reads = [
            self.read(operand, sbp, phase)
            for operand, sbp in zip(node.operands, signature.operands, strict=True)
        ]
        call = micro_call(node, node.first, signature, reads, self.micro_batches)
        outputs = tuple(
            value and replace(value, name=self._copy_name(value.name)) for value in call.outputs
        )
        again = Phase(phase.stage, node.phase.kind)
        self.calls.append(call.changed(outputs=outputs, phase=again))
        for old, new, sbp in zip(node.outputs, outputs, signature.results, strict=True):
            if old is not None and new is not None:
                self.note(old.name, sbp, new, stage)
        return self.made[name, form, stage]

    def _can_make(self, name: str, form: SBP) -> bool:
        """True where a value made from nothing can be made in this form."""
        if form == Broadcast():
            return True
        if (name, form) not in self._makable:
            found = next(self._makers(self._producer(name), name, form), None)
            self._makable[name, form] = found is not None
        return self._makable[name, form]

    def _makers(self, node: Call, name: str, form: SBP) -> Iterator[Signature]:
        """The signatures under which `node` makes `name` in a form, of operands that can be made so."""
        index = next(i for i, value in enumerate(node.outputs) if value and value.name == name)
        for signature in even_signatures(node.first, self.micro_batches):
            wanted = zip(node.operands, signature.operands, strict=True)
            if signature.results[index] == form and (
                form == Broadcast() or all(self._can_make(*pair) for pair in wanted)
            ):
                yield signature

    def _producer(self, name: str) -> Call:
        node = self.graph.producers[name]
        assert isinstance(node, Call)
        return node

    def _home(self, name: str) -> Phase:
        node = self.graph.producers[name]
        return node.phase if isinstance(node, Call) else FORWARD

    def _shape(self, old: Value, form: Form) -> tuple[int, ...]:
        if not isinstance(form, Split | Strided):
            return old.shape
        length = old.shape[form.dim] // self.micro_batches
        return (*old.shape[: form.dim], length, *old.shape[form.dim + 1 :])

    def _copy_name(self, name: str) -> str:
        if name in self._given or name in self.forms:
            return self._fresh(f"{name}.whole" if name in self.forms else f"{name}.again")
        self._given.add(name)
        return name

    def _fresh(self, wish: str) -> str:
        name, count = wish, 0
        while name in self._names:
            count += 1
            name = f"{wish}{count}"
        self._names.add(name)
        return name
