"""The five kinds of nodes of a logical graph, and the values between them.

Every value is assigned once; `Update` nodes write a new version of an input in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, final

from weft.cached import cached_property
from weft.errors import InternalError
from weft.ir.arguments import Arg as Arg
from weft.ir.arguments import Called as Called
from weft.ir.arguments import PerMicroBatch as PerMicroBatch
from weft.ir.arguments import Ref as Ref
from weft.ir.arguments import Specified as Specified
from weft.ir.arguments import numbered as numbered
from weft.ir.arguments import refs as refs
from weft.ir.arguments import with_names
from weft.layout import SBP, Layout, Shares, Split
from weft.ops.call import OpCall
from weft.ops.weft_ops import ops_that

Role: TypeAlias = Literal["parameter", "buffer", "state", "batch", "constant"]
ROLES: tuple[Role, ...] = ("parameter", "buffer", "state", "batch", "constant")
Sent: TypeAlias = Literal["once", "each"]
# Roles whose values live on from one step to the next.
VARIABLE_ROLES: frozenset[Role] = frozenset(("parameter", "buffer", "state"))
# Ops that make one value of all micro-batches of a step.
OVER_STEP: frozenset[str] = ops_that("over_step")

# The optimizer's state that is a float32 copy of its parameter: the update changes the copy, and the
# parameter becomes what it is when rounded.
MASTER = "weft_master"

# The phase that a call is part of, for schedules; "weight" is the part of backward that makes the gradients
# of parameters, which nothing waits for.
PhaseKind: TypeAlias = Literal["forward", "backward", "weight"]


@final
@dataclass(frozen=True, slots=True)
class Value(Specified):
    """A tensor of the graph: its name, whole shape, dtype, and, once deduced, its layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None = None

    @property
    def laid(self) -> Layout:
        """The layout, in a graph that has layouts."""
        if self.layout is None:
            raise InternalError(f"%{self.name} has no layout")
        return self.layout

    @property
    def is_even(self) -> bool:
        """True if all shards have one shape."""
        parts = Counter[int]()
        for size, sbp in zip(self.laid.placement.shape, self.laid.sbp, strict=True):
            if isinstance(sbp, Split):
                parts[sbp.dim] = max(parts[sbp.dim], 1) * size
        return all(self.shape[dim] % count == 0 for dim, count in parts.items())


@final
@dataclass(frozen=True, slots=True)
class Location:
    """The place in the user's program that a node comes from.

    Attributes:
        module: path of the `nn.Module` whose forward ran, such as "blocks.0.fc"; empty outside the
            model.
        backward: true if the node belongs to the backward pass of that line.
        stage: what `with weft.stage(i)` around the line says; None outside of one.
        checkpoint: number of the `torch.utils.checkpoint` around the line, which the backward makes
            again; None outside of one.
    """

    file: str
    line: int
    module: str = ""
    backward: bool = False
    stage: int | None = None
    checkpoint: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        inside = f" in {self.module}" if self.module else ""
        return f"{where}{inside}{' (backward)' if self.backward else ''}"


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """The stage that runs a call, and whether it belongs to its forward or its backward."""

    stage: int
    kind: PhaseKind

    def __str__(self) -> str:
        return f"{{{self.stage} {self.kind}}}"


FORWARD = Phase(0, "forward")

# Ops that pass their operand on as it is, in the layout that a `Hint` says; a take makes a value of its
# own of a parameter that several groups of calls gather for themselves.
HINT, TAKE = "weft.hint", "weft.take"


@final
@dataclass(frozen=True, slots=True)
class Hint:
    """The layout that the result of a call must have, at any cost.

    Attributes:
        sbps: one for each axis of the placement, or one for all of them; None leaves an axis free.
        stored: the axis, if the compiler sets how a parameter or its gradient
            is stored, or that it is whole from there on; None for a hint of the user.
    """

    sbps: tuple[SBP | None, ...]
    stored: int | None = None

    def __str__(self) -> str:
        """`S(0), *`, as messages and the text of graphs show it."""
        return ", ".join("*" if sbp is None else str(sbp) for sbp in self.sbps)

    def at(self, axis: int) -> SBP | None:
        """The SBP that the hint asks for on one axis."""
        return self.sbps[axis if len(self.sbps) > 1 else 0]

    def with_axis(self, axis: int, sbp: SBP | None) -> Hint:
        """Another hint, which says `sbp` of one axis."""
        place = axis if len(self.sbps) > 1 else 0
        return Hint((*self.sbps[:place], sbp, *self.sbps[place + 1 :]), self.stored)


@final
@dataclass(frozen=True, slots=True)
class Input:
    """A value that comes from outside: a variable (parameter, buffer, state), an entry of the batch, a constant.

    `key` is the name users know: "blocks.0.fc.weight", "blocks.0.fc.weight.exp_avg", "x",
    "[1].mask". `shares` says in which order a variable is stored, where that is not the order that
    users know; the value is in that order too.

    An entry of the batch that is `cut` has the micro-batches first: [micro-batches, part of the batch, ...].
    In the graph of one stage, `sent` says that another stage makes the value, once a step or for
    each micro-batch.
    """

    value: Value
    role: Role
    key: str
    shares: Shares | None = None
    cut: bool = False
    sent: Sent | None = None
    uses: ClassVar[tuple[str, ...]] = ()

    @property
    def makes(self) -> tuple[Value, ...]:
        """The value that comes in."""
        return (self.value,)


@final
@dataclass(frozen=True)
class Call(Called):
    """One call of an op.

    Attributes:
        call, operands: as `Called` says; `Call.of` makes them of arguments with names.
        outputs: one entry for each result; None if the op returns no tensor.
        phase: the stage that runs it, and whether it is forward or backward.
        autograd: number of the autograd node that a forward call made, and in whose backward a
            backward call ran, so that the two belong together; None if a call has no other half.
        hint: of `HINT` and `TAKE`, how the result is to be laid out.
    """

    call: OpCall
    operands: tuple[str, ...]
    outputs: tuple[Value | None, ...]
    location: Location | None = None
    phase: Phase = FORWARD
    autograd: int | None = None
    hint: Hint | None = None

    @classmethod
    def of(
        cls,
        op: str,
        args: tuple[Arg, ...],
        outputs: tuple[Value | None, ...],
        *,
        kwargs: tuple[tuple[str, Arg], ...] = (),
        **fields: Any,
    ) -> Call:
        """A call of arguments with names (see `numbered`); `fields` are its other fields."""
        call, operands = numbered(op, args, kwargs, outputs)
        return cls(call, operands, outputs, **fields)

    @cached_property
    def makes(self) -> tuple[Value, ...]:
        """The values that the call makes."""
        return tuple(value for value in self.outputs if value is not None)

    @property
    def module(self) -> str:
        """Path of the `nn.Module` whose forward made the call, as in its location; empty outside the model."""
        return self.location.module if self.location else ""

    @property
    def output_names(self) -> tuple[str, ...]:
        """The name of each result; empty for one that is not a tensor."""
        return tuple([value.name if value else "" for value in self.outputs])


@final
@dataclass(frozen=True, slots=True)
class Box:
    """Boxing: `output` is `input` in another layout. `cause` names the node that asked for it, in words."""

    input: Ref
    output: Value
    cause: str = ""

    @property
    def makes(self) -> tuple[Value, ...]:
        """The value in its new layout."""
        return (self.output,)

    @property
    def uses(self) -> tuple[str, ...]:
        """The value as it was."""
        return (self.input.name,)


@final
@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """The memory that an update takes while it runs, in bytes for each element of its target.

    Attributes:
        alone: while it runs.
        left: further ones, while it runs in a loop behind another one.
        together: further bytes while a fused group of updates runs.
    """

    alone: int = 0
    left: int = 0
    together: int = 0


NO_UPDATE_BYTES = UpdateBytes()


@final
@dataclass(frozen=True, slots=True)
class Update:
    """Write a new version of the variable `target` in place.

    `rule` is "copy" (the new version is `source`) or the name of an optimizer class, such as "AdamW" (`source` is the
    gradient, `states` the optimizer's tensors for this parameter, updated in place too). `group` is the number of the
    parameter group that the hyperparameters come from, counted through all optimizers
    (`weft.capture.optimizer_groups`). `elementwise` says whether the rule may run on any shard. If the number `skip`
    is not 0, the update is left out. `takes` is the memory that it takes while it runs.
    """

    rule: str
    target: Ref
    source: Ref
    states: tuple[Ref, ...] = ()
    group: int = 0
    elementwise: bool = True
    skip: Ref | None = None
    takes: UpdateBytes = NO_UPDATE_BYTES
    makes: ClassVar[tuple[Value, ...]] = ()

    @property
    def uses(self) -> tuple[str, ...]:
        """Target, source, states, and the number that may leave the update out."""
        names = [ref.name for ref in self.states]
        return (
            self.target.name,
            self.source.name,
            *names,
            *([self.skip.name] if self.skip else ()),
        )


@final
@dataclass(frozen=True, slots=True)
class Output:
    """A value that `step` returns; `key` is its place in what the loss function returned, such as "loss" or "[1]"."""

    value: Ref
    key: str
    makes: ClassVar[tuple[Value, ...]] = ()

    @property
    def uses(self) -> tuple[str, ...]:
        """The value that is returned."""
        return (self.value.name,)


Node: TypeAlias = Input | Call | Box | Update | Output


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """`node` reading other values: new names by old ones. An update's target and states stay."""

    def ref(old: Ref) -> Ref:
        return Ref(names.get(old.name, old.name))

    match node:
        case Call():
            return with_names(node, names)
        case Update(source=source, skip=skip):
            return replace(node, source=ref(source), skip=skip and ref(skip))
        case Output(value=value):
            return replace(node, value=ref(value))
        case Box(input=value):
            return replace(node, input=ref(value))
        case _:
            return node
