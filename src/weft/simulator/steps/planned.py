"""A planned step: what a simulation has to know of a program, as data; nothing in it says how it was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from weft.cached import cached_property
from weft.errors import RuleError
from weft.ir.logical import Call, LogicalGraph
from weft.ir.plan import Communicate, Communicator, Compute, LocalValue, RankPlan
from weft.ops import flops
from weft.units import Bytes, Flops


@final
@dataclass(frozen=True)
class PlannedStep:
    """The plans of a step, and what is known of its ranks.

    Attributes:
        graph: the logical graph that they were made of; its calls know the user's lines.
        plans: of the ranks that stand for all; communicators have orders.
        communicators: of all ranks.
        ranks: all of them.
        classes: for each rank, the one that stands for it; missing ones stand for themselves.
        families: for each communicator, the ids of those that run what it runs at the same time.
        peaks: bytes that ranks with a plan hold when they hold most.
        work: floating-point operations of the model's step, nothing recomputed; None to count those
            of `graph`.
        samples: of a step; 0 where that is not known.
        tokens: of a step; 0 where its samples are no sequences of tokens.
    """

    graph: LogicalGraph
    plans: Sequence[RankPlan]
    communicators: Sequence[Communicator]
    ranks: Sequence[int]
    classes: Mapping[int, int] = field(default_factory=dict)
    families: Mapping[int, Sequence[int]] = field(default_factory=dict)
    peaks: Mapping[int, Bytes] = field(default_factory=dict)
    work: Flops | None = None
    samples: int = 0
    tokens: int = 0

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """The ranks that each planned rank stands for, itself among them."""
        found: dict[int, list[int]] = {plan.rank: [] for plan in self.plans}
        alone = {self.plans[0].rank} if len(self.plans) == 1 else set[int]()
        for rank in self.ranks:
            # One plan without classes stands for all ranks: they do not differ in what they do when.
            stands = self.classes.get(rank, next(iter(alone), rank))
            found.setdefault(stands, []).append(rank)
        return {rank: of for rank, of in found.items() if of}

    @cached_property
    def flops(self) -> Flops:
        """Floating-point operations of a step, of all ranks together."""
        return self.work if self.work is not None else step_flops(self.graph)[0]

    @cached_property
    def dtype(self) -> str:
        """The dtype in which most operations are done: the peak that they are compared with."""
        return step_flops(self.graph)[1]


def step_flops(graph: LogicalGraph) -> tuple[Flops, str]:
    """The floating-point operations of all calls of a step at logical size, and the dtype of most of them."""
    by_dtype: dict[str, int] = {}
    loop = graph.loop
    for call in graph.of_kind(Call):
        times = graph.micro_batches if any(v.name in loop for v in call.makes) else 1
        one = call.first
        try:
            work = times * flops(one)
        except RuleError:
            continue
        floats = (spec.dtype for spec in one.operands if "float" in spec.dtype)
        dtype = next(floats, "float32")
        by_dtype[dtype] = by_dtype.get(dtype, 0) + work
    most = max(by_dtype, key=lambda dtype: (by_dtype[dtype], dtype), default="float32")
    return Flops(sum(by_dtype.values())), most


def values_of(plan: RankPlan) -> dict[str, LocalValue]:
    """Every local value of a plan by name."""
    found = {item.value.name: item.value for item in plan.inputs}
    for actor in plan.actors:
        if isinstance(actor, Compute):
            found.update((value.name, value) for node in actor.nodes for value in node.makes)
        elif isinstance(actor, Communicate):
            found.update((v.name, v) for each in actor.collectives for v in each.makes)
    return found
