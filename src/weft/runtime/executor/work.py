"""The work of each kind of actor when it acts: a function from input tensors to output tensors, bound once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor

from weft.cached import cached_property
from weft.capture.optimizer_groups import Optimizing
from weft.errors import InternalError
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    Feed,
    Fetch,
    LocalCall,
    LocalUpdate,
    RankPlan,
    Transfer,
)
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.collectives import run_collectives, run_transfer
from weft.runtime.compiled.choice import UNCOMPILED, Kernels
from weft.runtime.compiled.parts import PartCutter
from weft.runtime.devices.cuda_graphs import Call, GraphedSegment, GraphRunner, Run, draws_of
from weft.runtime.executor.optimizer import group_updates
from weft.runtime.kernels.generated import Kernel, build_kernel
from weft.runtime.memory.state import Batches, Variables
from weft.runtime.random import uniform
from weft.runtime.recording import note_kind


@final
@dataclass(frozen=True)
class Rank:
    """The data that the actors of a rank work with.

    Attributes:
        variables: shards of all inputs of the plan that are not batch; states that the optimizer
            makes may be missing.
        optimizer: the user's, one or several, for plans with updates.
        replayer: what replays some of them; None launches every call of all.
    """

    plan: RankPlan
    device: torch.device
    channels: Mapping[int, Channel]
    variables: Variables
    optimizer: Optimizing = None
    seed: int = 0
    batches: Batches = field(default_factory=Batches)
    kernels: Kernels = "aten"
    replayer: GraphRunner | None = None

    @cached_property
    def part_cutter(self) -> PartCutter | None:
        """The cutter of segments into parts for Inductor; None if all is ATen code."""
        if self.kernels in UNCOMPILED:
            return None
        keys = self.plan.lasting.items()
        there = {name: self.variables[key] for name, key in keys if key in self.variables}
        return PartCutter(self.plan, self.device, there, self.kernels)

    @cached_property
    def readers(self) -> Counter[tuple[str, str]]:
        """The number of actors of a queue that read a register, by its name and the queue."""
        return Counter((name, actor.queue) for actor in self.plan.actors for name in actor.consumes)


# `act(step, micro, inputs) -> outputs`: inputs and outputs are the tensors of `Work.reads` and
# `Work.writes`, in order. It may empty the list of inputs, to free them early.
ActFunction = Callable[[int, int, list[Tensor]], Sequence[Tensor]]


@final
@dataclass(frozen=True)
class Work:
    """The work of one actor.

    Attributes:
        once: of several acts a step, the registers that all of them read or make together.
        sole: registers of which this is the only reader on its queue.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    act: ActFunction
    acts: int = 1
    once: frozenset[str] = frozenset()
    sole: frozenset[str] = frozenset()

    @cached_property
    def alone(self) -> bool:
        """True if nobody else on its queue reads anything that it reads."""
        return self.sole.issuperset(self.reads)


def bind_work(actor: Actor, rank: Rank) -> Work:
    """Compile and bind the work of an actor that acts."""
    reads = tuple(name for name in actor.consumes if name not in rank.plan.silent)
    writes = tuple(name for name in actor.produces if name not in rank.plan.silent)
    match actor:
        case Feed():
            keys, batches = actor.keys, rank.batches
            act: ActFunction = lambda *_: [batches.fed[key] for key in keys]  # noqa: E731
        case Fetch():
            act = _bind_fetch(actor, rank, reads)
        case Communicate():
            act = _bind_communicate(actor, rank, reads)
        case Compute():
            act = _bind_compute(actor, rank, reads, writes)
        case _:
            raise InternalError(f"actor {actor.id} never acts")
    # For several acts a step, registers that have one version a step.
    registers = rank.plan.register_of
    every = reads + writes if actor.acts > 1 else ()
    once = frozenset(name for name in every if registers[name].rate == 1)
    sole = frozenset(name for name in reads if rank.readers[name, actor.queue] == 1)
    return Work(reads, writes, act, actor.acts, once, sole - once)


def _bind_fetch(actor: Fetch, rank: Rank, reads: Sequence[str]) -> ActFunction:
    gather = _bind_operands(actor.consumes, reads, rank)
    # Results of CUDA graphs are in the same memory in every step, and any value may be a view of it.
    replays = bool(rank.plan.replayed)
    copied = [replays or name in rank.plan.lasting for name in actor.consumes]

    def act(step: int, micro: int, inputs: list[Tensor]) -> Sequence[Tensor]:
        for key, tensor, copy in zip(actor.keys, gather(inputs), copied, strict=True):
            rank.batches.fetched[key] = tensor.clone() if copy else tensor
        return ()

    return act


def _bind_communicate(actor: Communicate, rank: Rank, reads: Sequence[str]) -> ActFunction:
    first = actor.collectives[0]
    channel = rank.channels[first.communicator]
    if isinstance(first, Transfer):
        operand = _bind_operands(tuple(first.reads), reads, rank)

        def transfer(step: int, micro: int, inputs: list[Tensor]) -> Sequence[Tensor]:
            operands = operand(inputs)
            made = run_transfer(channel, first, operands[0] if operands else None)
            return () if made is None else (made,)

        return transfer
    collectives = [each for each in actor.collectives if isinstance(each, Collective)]
    gather = _bind_operands([each.input.name for each in collectives], reads, rank)

    def act(step: int, micro: int, inputs: list[Tensor]) -> Sequence[Tensor]:
        return run_collectives(channel, collectives, gather(inputs))

    return act


def _bind_compute(
    actor: Compute, rank: Rank, reads: Sequence[str], writes: Sequence[str]
) -> ActFunction:
    calls = [node for node in actor.nodes if isinstance(node, LocalCall)]
    updates = [node for node in actor.nodes if isinstance(node, LocalUpdate)]
    held = partial(getattr, rank.batches, "held")
    joined = group_updates(updates, rank.variables, rank.optimizer, held)
    sources = [name for names, _ in joined for name in names]
    made = (*writes, *sources)
    cut = None if rank.part_cutter is None else rank.part_cutter.cut(actor, made)
    kernel = build_kernel(calls, made, rank.device, actor.copies, actor.acts, drains=True, cut=cut)
    gather = _bind_operands(kernel.inputs, reads, rank)
    run = _bind_kernel(actor, kernel, rank)
    counts = [(len(names), update) for names, update in joined]
    fresh = len(writes)
    changes = any(update.rule != "copy" for update in updates)

    def act(step: int, micro: int, inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = run(step, micro, gather(inputs))
        if not counts:
            return outputs
        if changes:
            rank.batches.updated = True
        given = outputs[fresh:]
        note_kind(given, "gradients")
        start = 0
        for count, update in counts:
            update(given[start : start + count])
            start += count
        return outputs[:fresh]

    return act


def _bind_kernel(actor: Compute, kernel: Kernel, rank: Rank) -> Run:
    function, batches = kernel.function, rank.batches
    draws = partial(partial, uniform, rank.seed) if kernel.draws else None

    def launched(step: int, micro: int, operands: list[Tensor]) -> Sequence[Tensor]:
        draw = draws(batches.first + step) if draws else None
        return function(draw, micro, operands) if kernel.looped else function(draw, operands)

    replayer = rank.replayer
    if replayer is None or not actor.replayed:
        return launched
    call: Call = function if kernel.looped else lambda draw, _, operands: function(draw, operands)
    bound = frozenset(rank.plan.lasting)
    return GraphedSegment(
        actor.id, replayer, call, launched, kernel, bound, draws_of(actor), batches
    )


def _bind_operands(
    names: Sequence[str], reads: Sequence[str], rank: Rank
) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function from the tensors of `reads` to those of `names`: registers' contents and variables mixed.

    It empties the list that it takes, or gives it on: nobody else holds what is freed early.
    """
    lasting = rank.plan.lasting
    if list(names) == list(reads):
        return lambda inputs: inputs
    bound: list[Tensor | None] = []
    places: list[tuple[int, int]] = []
    for index, name in enumerate(names):
        if name in lasting:
            key = lasting[name]
            if key not in rank.variables:
                raise InternalError(f"rank {rank.plan.rank}: there is no variable {key} for {name}")
            variable = rank.variables[key]
            # A constant stays the same object: the executor may let it have other memory.
            bound.append(variable.detach() if variable.requires_grad else variable)
        elif name in reads:
            bound.append(None)
            places.append((index, reads.index(name)))
        else:
            raise InternalError(f"rank {rank.plan.rank}: nothing gives {name} to its reader")

    def gather(inputs: list[Tensor]) -> list[Tensor]:
        operands: list[Tensor] = bound.copy()  # type: ignore[assignment]  # the gaps are filled next
        for index, position in places:
            operands[index] = inputs[position]
        inputs.clear()
        return operands

    return gather
