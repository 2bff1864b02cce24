"""The values of a step in micro-batches, in the forms in which its calls want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, final

from weft.compiler.microbatch.facts import Facts, sum_of_leaf
from weft.compiler.microbatch.forms import Form, Own, Source, Strided, even_signatures, micro_call
from weft.errors import StrategyError
from weft.ir.logical import Arg, Call, LogicalGraph, Ref, Value
from weft.ir.nodes import FORWARD, PerMicroBatch, Phase
from weft.layout import SBP, Broadcast, Partial, Split
from weft.ops import Signature
from weft.ops.rule import rule_of

# Where a value comes from that is not read in the form of a result: an entry of the batch in parts; what needs no
# micro-batch; a view that is taken of the whole.
_Origin: TypeAlias = Literal["leaf", "nothing", "view"]
# The op that takes one micro-batch's part of a cut batch entry.
SELECT = "aten.select.int"


@final
@dataclass(slots=True)
class Values:
    """The values made so far; `read` makes missing values.

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
        # It is not there yet: made by several calls, or by the one of its row in `_ROWS`.
        made = self._made_as(name, form)
        if isinstance(form, Strided):
            return self._in_blocks(name, form, phase)
        if made == "nothing" and isinstance(form, Split | Broadcast):
            summed = self._summed(name, phase) if form == Broadcast() else None
            return summed or self._again(name, form, phase)
        if made == "view":
            # The viewed value may be wanted whole as well, and is packed once for both.
            return self._again(name, Broadcast())
        if isinstance(made, Strided) and form == Broadcast():
            return self._packed(name, made)
        key = type(form), made if isinstance(made, str) else type(made)
        row = _ROWS.get(key) or _ROWS[type(form), "made"]
        at = phase if row.at_reader else self._home(name)
        args = row.args(self, name, form, phase)
        shape = self.shape(self.graph.values[name], form)
        value = self._new(name, row.suffix, row.op, args, shape, at)
        self.note(name, form, value, phase.stage if row.at_reader else None)
        return value

    def _made_as(self, name: str, form: Form) -> Form | _Origin:
        """The form in which a value is made, or where it comes from, seen from a form that is wanted."""
        whole, facts = form == Broadcast(), self.facts
        if name in facts.leaves and (whole or form == Split(0)):
            return "leaf"
        if whole and (name in facts.nothing or name in facts.whole):
            return "nothing"
        if name in facts.nothing and isinstance(form, Split) and self._can_make(name, form):
            return "nothing"
        made = self.forms.get(name, Broadcast())
        if whole and isinstance(made, Split | Strided):
            node, values = self._producer(name), self.graph.values
            sizes = {prod(values[each].shape) for each in (name, *node.operands)}
            if len(node.operands) == 1 == len(sizes) and rule_of(node.first).view:
                return "view"
        return made

    def ref(self, name: str) -> Ref:
        """An argument that is a value as it is made: a leaf in parts, what is its own of each micro-batch."""
        value = self.graph.values[name]
        return replace(value, shape=self.cut(value)).ref if name in self.facts.leaves else value.ref

    def cut(self, leaf: Value) -> tuple[int, ...]:
        """The shape of a leaf in parts."""
        return (self.micro_batches, leaf.shape[0] // self.micro_batches, *leaf.shape[1:])

    def each(self, step: int) -> PerMicroBatch:
        """For each micro-batch its number, times a step."""
        return PerMicroBatch(tuple(step * m for m in range(self.micro_batches)))

    def _in_blocks(self, name: str, form: Strided, phase: Phase) -> Value:
        """For each micro-batch its part of every block, cut from the whole."""
        whole, dim = self.operand(name, Broadcast(), phase), form.dim
        blocks = (
            *whole.shape[:dim],
            form.outer,
            whole.shape[dim] // form.outer,
            *whole.shape[dim + 1 :],
        )
        viewed = self._viewed(whole, blocks, name, phase)
        length = blocks[dim + 1] // self.micro_batches
        cut = (*blocks[: dim + 1], length, *whole.shape[dim + 1 :])
        args = (viewed.ref, dim + 1, self.each(length), length)
        part = self._new(name, "micro", "weft.slice", args, cut, phase)
        made = self._viewed(part, self.shape(self.graph.values[name], form), name, phase)
        self.note(name, form, made, phase.stage)
        return made

    def _packed(self, name: str, form: Strided) -> Value:
        """All micro-batches of what is split in blocks, as a whole."""
        old, dim, home, read = (
            self.graph.values[name],
            form.dim,
            self._home(name),
            self.read(name, form),
        )
        length, rest = read.shape[dim] // form.outer, old.shape[dim + 1 :]
        viewed = self._viewed(read, (*old.shape[:dim], form.outer, length, *rest), name, home)
        whole = (*old.shape[:dim], form.outer, length * self.micro_batches, *rest)
        packed = self._new(name, "all", "weft.pack", (viewed.ref, dim + 1), whole, home)
        made = self._viewed(packed, old.shape, name, home)
        self.note(name, Broadcast(), made)
        return made

    def _summed(self, name: str, phase: Phase) -> Value | None:
        """A sum over a leaf, of the leaf as it is cut; None when `name` is no such sum."""
        found = sum_of_leaf(self.graph, name, self.facts.leaves)
        if found is None:
            return None
        leaf, calls = found
        shape = self.cut(self.graph.values[leaf])
        made = self._new(
            leaf, "parts", "aten.reshape.default", (self.ref(leaf), shape), shape, phase
        )
        for call in calls:
            (value,) = call.makes
            last = () if call is calls[-1] else shape
            whole = replace(value, name=self._copy_name(value.name), shape=last)
            kind = Phase(phase.stage, call.phase.kind)
            self.calls.append(call.on(made).changed(outputs=(whole,), phase=kind))
            made = whole
        self.note(name, Broadcast(), made, phase.stage)
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

    def _again(self, name: str, form: SBP, phase: Phase | None = None) -> Value:
        """Make a value in a form in which its operands can be made as well: at a reader, or where the value is made."""
        node, stage = self._producer(name), phase.stage if phase else None
        at = phase or self._home(name)
        signature = next(self._makers(node, name, form))
        reads = [
            self.read(operand, sbp, at)
            for operand, sbp in zip(node.operands, signature.operands, strict=True)
        ]
        call = micro_call(node, signature, reads, self.micro_batches)
        outputs = tuple(
            value and replace(value, name=self._copy_name(value.name)) for value in call.outputs
        )
        self.calls.append(call.changed(outputs=outputs, phase=Phase(at.stage, node.phase.kind)))
        for old, new, sbp in zip(node.outputs, outputs, signature.results, strict=True):
            if old is not None and new is not None:
                self.note(old.name, sbp, new, stage)
        return self.made[name, form, stage]

    def _can_make(self, name: str, form: SBP) -> bool:
        """True if a value made from nothing can be made in this form."""
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

    def shape(self, old: Value, form: Form) -> tuple[int, ...]:
        """The shape in a form of a value whose whole is `old`."""
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


@final
class _Row(NamedTuple):
    """The call that makes another form of a value.

    Attributes:
        suffix: of the name of its result.
        args: its arguments, of the values, a name, the form that is wanted, and the phase of the reader.
        at_reader: true if it runs in each stage that reads the form; else it runs once, where the value is made.
    """

    suffix: str
    op: str
    args: Callable[[Values, str, Any, Phase], tuple[Arg, ...]]
    at_reader: bool = False


def _sliced(values: Values, name: str, form: Split, phase: Phase) -> tuple[Arg, ...]:
    whole = values.operand(name, Broadcast(), phase)
    length = whole.shape[form.dim] // values.micro_batches
    return whole.ref, form.dim, values.each(length), length


def _joined(values: Values, name: str, _: Form, phase: Phase) -> tuple[Arg, ...]:
    made: Any = values.forms[name]
    how: Arg = made.dim if isinstance(made, Split) else made.reduction
    return values.read(name, made, phase).ref, how


def _averaged(values: Values, name: str, form: Partial, _: Phase) -> tuple[Arg, ...]:
    value = values.read(name, Own())
    if form != Partial() or "float" not in value.dtype:
        raise StrategyError(
            f"%{name} ({value.dtype}) has a value for each micro-batch, of which the step "
            "wants one; only of floating-point values the mean is taken. Leave micro_batches "
            "out, or do not return it"
        )
    return value.ref, 1 / values.micro_batches


# The form that is wanted, the form in which a value is made ("made" for any other) → the call that makes one of the
# other.
_ROWS: Mapping[tuple[type, type | str], _Row] = {
    (Split, "leaf"): _Row("micro", SELECT, lambda v, x, *_: (v.ref(x), 0, v.each(1)), True),
    (Split, "made"): _Row("micro", "weft.slice", _sliced, True),
    (Broadcast, "leaf"): _Row(
        "whole", "aten.reshape.default", lambda v, x, *_: (v.ref(x), v.graph.values[x].shape), True
    ),
    (Broadcast, Split): _Row("all", "weft.pack", _joined),
    (Broadcast, Partial): _Row("all", "weft.accumulate", _joined),
    (Broadcast, Own): _Row(
        "all", "weft.accumulate", lambda v, x, *_: (v.read(x, Partial()).ref, "sum")
    ),
    (Partial, "made"): _Row("mean", "aten.mul.Tensor", _averaged),
    (Own, Own): _Row("use", "weft.use", lambda v, x, *_: (v.ref(x), v.each(1)), True),
}
