"""The plan: actors and registers of every rank, and the communicators between them. The plan holds only
what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Literal, TypeAlias, final

from weft.cached import cached_property
from weft.ir.forms import actor_text, local_text, micro_text, part_text, quoted
from weft.ir.nodes import VARIABLE_ROLES
from weft.ir.plan_nodes import COLLECTIVE_KINDS as COLLECTIVE_KINDS
from weft.ir.plan_nodes import COMPUTE as COMPUTE
from weft.ir.plan_nodes import HOST as HOST
from weft.ir.plan_nodes import Actor as Actor
from weft.ir.plan_nodes import Collective as Collective
from weft.ir.plan_nodes import CollectiveKind as CollectiveKind
from weft.ir.plan_nodes import Communicate as Communicate
from weft.ir.plan_nodes import Communicator as Communicator
from weft.ir.plan_nodes import Compute as Compute
from weft.ir.plan_nodes import Exchange as Exchange
from weft.ir.plan_nodes import Feed as Feed
from weft.ir.plan_nodes import Fetch as Fetch
from weft.ir.plan_nodes import Hold as Hold
from weft.ir.plan_nodes import LocalCall as LocalCall
from weft.ir.plan_nodes import LocalInput as LocalInput
from weft.ir.plan_nodes import LocalNode as LocalNode
from weft.ir.plan_nodes import LocalOutput as LocalOutput
from weft.ir.plan_nodes import LocalUpdate as LocalUpdate
from weft.ir.plan_nodes import LocalValue as LocalValue
from weft.ir.plan_nodes import Order as Order
from weft.ir.plan_nodes import Piece as Piece
from weft.ir.plan_nodes import Register as Register
from weft.ir.plan_nodes import RegisterKind as RegisterKind
from weft.ir.plan_nodes import Transfer as Transfer
from weft.units import Seconds


@final
@dataclass(frozen=True)
class LocalProgram:
    """One rank's view of the step, in the order it may run on one thread.

    Attributes:
        loop: the values that are made once for each of the `micro_batches`.
        origins: of values that are another form of one, such as its parts, its copies and what stands
            between two steps of boxing, that one; the others are called as in the logical graph.
    """

    rank: int
    inputs: tuple[LocalInput, ...]
    nodes: tuple[LocalNode, ...]
    outputs: tuple[LocalOutput, ...]
    micro_batches: int = 1
    loop: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def held(self) -> set[object]:
        """The rules that were found to hold (`weft.ir.legal.tables`): a program never changes."""
        return set()

    @cached_property
    def values(self) -> dict[str, LocalValue]:
        """Every local value by name."""
        found = {item.value.name: item.value for item in self.inputs}
        return found | {value.name: value for node in self.nodes for value in node.makes}

    def with_nodes(self, nodes: Iterable[LocalNode]) -> LocalProgram:
        """The program with these nodes: itself, with all that is known of it, where they are its very own."""
        every = tuple(nodes)
        same = len(every) == len(self.nodes) and all(map(is_, every, self.nodes))
        return self if same else replace(self, nodes=every)

    def __str__(self) -> str:
        """One node a line; `weft.ir.parse_local` reads it back to an equal program."""
        head = f"local program of rank {self.rank}{micro_text(self.micro_batches)}"
        loop = [f"loop {' '.join(f'%{name}' for name in sorted(self.loop))}"] if self.loop else []
        forms = [f"form %{name} of %{self.origins[name]}" for name in sorted(self.origins)]
        lines = [head, *loop, *forms, *map(part_text, self.inputs), *map(local_text, self.nodes)]
        return "\n".join([*lines, *map(part_text, self.outputs)]) + "\n"


@final
@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank. `actors[i].id == i`; within a queue, actors are in the order of their work.

    An in-order queue with an entry in `orders` runs a step's acts in that order, any other one in
    the order of its actors.
    """

    rank: int
    inputs: tuple[LocalInput, ...]
    actors: tuple[Actor, ...]
    registers: tuple[Register, ...]
    micro_batches: int = 1
    orders: tuple[Order, ...] = ()

    @cached_property
    def register_of(self) -> dict[str, Register]:
        """The register of each value by its name."""
        return {register.value.name: register for register in self.registers}

    @cached_property
    def on_queue(self) -> dict[str, list[Actor]]:
        """The actors of each queue that act, in order."""
        found: dict[str, list[Actor]] = {}
        for actor in self.actors:
            if not isinstance(actor, Hold):
                found.setdefault(actor.queue, []).append(actor)
        return found

    @cached_property
    def lasting(self) -> dict[str, str]:
        """Registers whose tensor lasts from step to step, with the key of their variable or constant."""
        return {given.value.name: given.key for given in self.inputs if given.role != "batch"}

    @cached_property
    def silent(self) -> frozenset[str]:
        """Registers through which no tensor passes: those of variables, and control registers."""
        control = (r.value.name for r in self.registers if r.kind == "control")
        return frozenset((*self.lasting, *control))

    @cached_property
    def fetched(self) -> frozenset[str]:
        """The values that the step returns."""
        fetches = (actor for actor in self.actors if isinstance(actor, Fetch))
        return frozenset(name for fetch in fetches for name in fetch.consumes)

    @cached_property
    def rewritten(self) -> frozenset[str]:
        """The variables that a segment overwrites in place."""
        inputs = {item.value.name for item in self.inputs if item.role in VARIABLE_ROLES}
        segments = (actor for actor in self.actors if isinstance(actor, Compute))
        return frozenset(name for one in segments for name in one.produces if name in inputs)

    @cached_property
    def replayed(self) -> frozenset[int]:
        """The ids of the segments that are put on the device as one."""
        segments = (actor for actor in self.actors if isinstance(actor, Compute))
        return frozenset(one.id for one in segments if one.replayed)

    def __str__(self) -> str:
        lines = [f"rank {self.rank}{micro_text(self.micro_batches)}"]
        for parts in (self.inputs, self.orders, self.registers):
            lines += map(part_text, parts)
        lines += map(actor_text, self.actors)
        return "\n".join(lines) + "\n"


@final
@dataclass(frozen=True)
class Plan:
    """The plans of some or all ranks, with every communicator of the world."""

    name: str
    communicators: tuple[Communicator, ...]
    ranks: tuple[RankPlan, ...]

    def __str__(self) -> str:
        """Communicators, then rank after rank; `weft.ir.parse_plan` reads it back to an equal plan."""
        lines = [f"plan {quoted(self.name)}"]
        lines += map(part_text, self.communicators)
        return "\n".join(lines) + "\n" + "".join(map(str, self.ranks))


# "auto": where they pay; "always": wherever they can be had.
GraphMode: TypeAlias = Literal["auto", "always", "never"]


@final
@dataclass(frozen=True)
class GraphedRun:
    """The decisions which segments of a rank run as CUDA graphs.

    Attributes:
        reasons: for the id of every segment that is not replayed, why.
        launches: calls that the host would launch one by one in a step.
        saved: how many of these launches graphs avoid.
        host: seconds in which it would launch them.
        device: seconds in which the device runs them.
    """

    reasons: Mapping[int, str]
    launches: int
    saved: int
    host: Seconds
    device: Seconds
