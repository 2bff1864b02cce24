"""The parts of a plan: local nodes, registers, and the actors that they belong to.

A rank's local nodes work on plain local tensors. Actors are bound to queues; tensors that pass from
one actor to another are in registers. An actor acts once a step, or once for each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, final

from weft.cached import cached_property
from weft.ir.nodes import (
    FORWARD,
    NO_UPDATE_BYTES,
    Arg,
    Called,
    Phase,
    Role,
    Specified,
    UpdateBytes,
    numbered,
)
from weft.ops.call import OpCall
from weft.units import NO_BYTES, Bytes

CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
# A piece that passes between two ranks: (peer's place in the communicator, (offset, length) of each
# dimension).
Piece: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)

# A register's contents, for the memory table; "gradient": accumulated over micro-batches, "host":
# kept in the host's memory. A "control" register holds no tensor: its versions only make one actor
# wait for another.
RegisterKind: TypeAlias = Literal[
    "parameter",
    "buffer",
    "state",
    "batch",
    "constant",
    "activation",
    "communication",
    "gradient",
    "host",
    "control",
]

# Queues: "compute" (the device's stream), "host" (feeding the batch, fetching results),
# "comm:<communicator id>".
COMPUTE = "compute"
HOST = "host"


@final
@dataclass(frozen=True, slots=True)
class Communicator:
    """An ordered group of ranks with one queue of its own; collectives on it run in the order of the plan."""

    id: int
    ranks: tuple[int, ...]

    @property
    def queue(self) -> str:
        return f"comm:{self.id}"


@final
@dataclass(frozen=True, slots=True)
class LocalValue(Specified):
    """A local tensor: name, local shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@final
@dataclass(frozen=True)
class LocalCall(Called):
    """A call of an op on local tensors; `op` is an ATen name or one of weft's local ops (`weft.…`)."""

    call: OpCall
    operands: tuple[str, ...]
    outputs: tuple[LocalValue | None, ...]
    phase: Phase = FORWARD

    @classmethod
    def of(
        cls,
        op: str,
        args: tuple[Arg, ...],
        outputs: tuple[LocalValue | None, ...],
        phase: Phase = FORWARD,
        *,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> LocalCall:
        """A call of arguments with names (see `weft.ir.arguments.numbered`)."""
        call, operands = numbered(op, args, kwargs, outputs)
        return cls(call, operands, outputs, phase)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The local values that the call reads."""
        return frozenset(self.uses)

    @cached_property
    def makes(self) -> tuple[LocalValue, ...]:
        """The local values that the call makes."""
        return tuple(value for value in self.outputs if value is not None)


@final
@dataclass(frozen=True)
class LocalUpdate:
    """Write a new version of the local shard `target` in place (see `weft.ir.logical.Update`)."""

    rule: str
    target: str
    source: str
    states: tuple[str, ...]
    group: int
    key: str
    phase: Phase = FORWARD
    skip: str | None = None
    takes: UpdateBytes = NO_UPDATE_BYTES
    makes: ClassVar[tuple[LocalValue, ...]] = ()  # an update writes in place

    @cached_property
    def reads(self) -> frozenset[str]:
        """The local values that the update reads; it writes the target and the states."""
        skip = (self.skip,) if self.skip else ()
        return frozenset((self.target, self.source, *self.states, *skip))


@final
@dataclass(frozen=True)
class Collective:
    """One collective on one local tensor, as rank number `index` of its communicator sees it.

    Attributes:
        reduction: one of `weft.layout.REDUCTIONS`; for all_reduce and reduce_scatter.
        dim: dimension that is gathered (all_gather, all_to_all: concatenated) or scattered
            (reduce_scatter).
        split_dim: for all_to_all: the dimension that is cut into pieces for the peers.
        sizes: length along `dim` of every rank's piece (all_gather: inputs; reduce_scatter:
            outputs; all_to_all: the lengths of the pieces along `dim` as they arrive from each
            rank).
        split_sizes: for all_to_all: lengths along `split_dim` of the pieces for each rank.
        bytes: bytes sent between the ranks of the communicator in total; the channels count them.
        in_place: of an all_reduce: whether it writes its result over the input, which nobody else
            holds.
    """

    kind: CollectiveKind
    communicator: int
    input: LocalValue
    output: LocalValue
    reduction: str = "sum"
    dim: int = 0
    split_dim: int = 0
    sizes: tuple[int, ...] = ()
    split_sizes: tuple[int, ...] = ()
    bytes: Bytes = NO_BYTES
    phase: Phase = FORWARD
    in_place: bool = False

    @cached_property
    def reads(self) -> frozenset[str]:
        """The local value that goes in."""
        return frozenset((self.input.name,))

    @cached_property
    def makes(self) -> tuple[LocalValue, ...]:
        """The local value that comes out."""
        return (self.output,)


@final
@dataclass(frozen=True)
class Transfer:
    """An exchange of pieces between the ranks of two placements, as one rank of the communicator sees it.

    Attributes:
        communicator: id of the communicator, of the ranks of both placements.
        input: the local value before; None on a rank that is not in the placement that sends.
        output: the local value after; None on a rank that is not in the placement that receives.
        sends: for each peer that gets something, the region of the input; this rank itself may be
            one.
        receives: for each peer that gives something, the region of the output. Together they fill
            it.
        bytes: sent between the ranks of the communicator in total.
    """

    communicator: int
    input: LocalValue | None
    output: LocalValue | None
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    bytes: Bytes = NO_BYTES
    phase: Phase = FORWARD
    kind: ClassVar[Literal["transfer"]] = "transfer"

    @cached_property
    def reads(self) -> frozenset[str]:
        """The local value that goes in, if there is one."""
        return frozenset(() if self.input is None else (self.input.name,))

    @cached_property
    def makes(self) -> tuple[LocalValue, ...]:
        """The local value that comes out, if there is one."""
        return () if self.output is None else (self.output,)


Exchange: TypeAlias = Collective | Transfer
LocalNode: TypeAlias = LocalCall | LocalUpdate | Exchange


@final
@dataclass(frozen=True, slots=True)
class LocalInput:
    """A local value that comes from outside: the shard of a variable, of a batch entry, or of a constant."""

    value: LocalValue
    role: Role
    key: str


@final
@dataclass(frozen=True, slots=True)
class LocalOutput:
    """A local value that the step returns under `key`."""

    name: str
    key: str


@final
@dataclass(frozen=True, slots=True)
class Register:
    """A counted slot for one local tensor.

    Attributes:
        kind: for the memory table.
        producer: id of the actor that writes it.
        consumers: ids of the actors that read it (never the producer).
        credits: the number of versions that may exist at a time.
        full: true if a version is there before the first step (variables and constants).
        rate: versions per step: 1, or one for each micro-batch. An actor that acts more often
            writes its version over all its acts of the step, and reads the same one in all of them.
    """

    value: LocalValue
    kind: RegisterKind
    producer: int
    consumers: tuple[int, ...]
    credits: int = 1
    full: bool = False
    rate: int = 1


class OncePerStep:
    """An actor that acts once a step, and before no other on purpose."""

    __slots__ = ()

    acts: ClassVar[int] = 1
    priority: ClassVar[int] = 0


@final
@dataclass(frozen=True, slots=True)
class Feed(OncePerStep):
    """Host actor: takes the user's batch; leaf `keys[i]` fills register `produces[i]`."""

    id: int
    keys: tuple[str, ...]
    produces: tuple[str, ...]
    queue: str = HOST
    consumes: ClassVar[tuple[str, ...]] = ()


@final
@dataclass(frozen=True, slots=True)
class Compute:
    """A segment: local calls and updates that run without a stop on the compute queue.

    `produces` holds fresh tensors and the variables that the segment updates in place.

    Attributes:
        acts: acts per step: 1, or one for each micro-batch.
        priority: among actors of a queue that can act for one step, the lowest number goes first.
        copies: values to copy before they are handed on or updated, because they
            share memory with overwritten variables.
        parts: the first nodes of parts that may each be compiled as one kernel; equal layers make equal parts.
        replayed: true if the calls of an act run as a CUDA graph.
    """

    id: int
    nodes: tuple[LocalCall | LocalUpdate, ...]
    consumes: tuple[str, ...]
    produces: tuple[str, ...]
    queue: str = COMPUTE
    acts: int = 1
    priority: int = 0
    phase: Phase = FORWARD
    copies: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    replayed: bool = False


@final
@dataclass(frozen=True)
class Communicate:
    """One or more collectives of one kind, or one transfer, on one communicator, run as one.

    Attributes:
        acts, priority, phase: as those of `Compute`.
        waits: control registers that it consumes.
        signals: control registers that it produces.
    """

    id: int
    collectives: tuple[Exchange, ...]
    queue: str
    acts: int = 1
    priority: int = 0
    phase: Phase = FORWARD
    waits: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()

    @cached_property
    def consumes(self) -> tuple[str, ...]:
        read = dict.fromkeys(name for each in self.collectives for name in each.reads)
        return (*read, *self.waits)

    @cached_property
    def produces(self) -> tuple[str, ...]:
        made = (value.name for each in self.collectives for value in each.makes)
        return (*made, *self.signals)


@final
@dataclass(frozen=True, slots=True)
class Fetch(OncePerStep):
    """Host actor: hands the results of the step to the caller."""

    id: int
    keys: tuple[str, ...]
    consumes: tuple[str, ...]
    queue: str = HOST
    produces: ClassVar[tuple[str, ...]] = ()


@final
@dataclass(frozen=True, slots=True)
class Hold(OncePerStep):
    """Owner of the registers that no actor ever rewrites: constants, and variables without an update. Never acts."""

    id: int
    produces: tuple[str, ...]
    queue: str = HOST
    consumes: ClassVar[tuple[str, ...]] = ()


@final
@dataclass(frozen=True, slots=True)
class Order:
    """The order of one step's acts on an in-order queue: (actor id, micro-batch)."""

    queue: str
    acts: tuple[tuple[int, int], ...]


Actor: TypeAlias = Feed | Compute | Communicate | Fetch | Hold
