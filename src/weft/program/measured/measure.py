"""Measure what a program runs, on the ranks that run it: its distinct calls, its optimizers' updates, its exchanges."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import final

import torch

from weft.capture.optimizers.groups import Optimizers
from weft.compiler.pipeline import Compiled
from weft.compiler.plans.specialize import Target, join_sums, variant
from weft.hardware.costs import Slowdown
from weft.hardware.durations import joined_size
from weft.hardware.here import this_machine
from weft.hardware.measured import Measurements, Sample, SizedSample, from_json, to_json
from weft.hardware.measured.figures import DEVICE, PROCESSES, RANKS, THREADS
from weft.ir.plan import (
    Collective,
    CollectiveKind,
    Communicate,
    Communicator,
    LocalCall,
    LocalNode,
    LocalProgram,
)
from weft.program.measured.overheads import (
    Overheads,
    filling_program,
    frame,
    middle,
    overheads,
    tiny_program,
)
from weft.runtime.kernels.matmul import onednn_is_faster
from weft.runtime.measured.beside import slowdown
from weft.runtime.measured.calls import measured_calls, measured_updates
from weft.runtime.measured.exchanges import measured_exchanges
from weft.runtime.measured.operands import calls_in_order
from weft.runtime.measured.stopwatch import COLD
from weft.runtime.world.world import World
from weft.units import NO_BYTES, Bytes, Seconds

# A step that holds no more leaves the caches to what the host does.
_CACHED = Bytes(2**20)


@final
@dataclass(frozen=True)
class Patience:
    """Seconds to measure each thing for, at least.

    Attributes:
        call: one local call.
        update: the updates of one size.
    """

    call: float = 0.03
    update: float = 0.05


def machine_of(world: World) -> dict[str, str | int]:
    """The facts of this machine and process that measurements hold for."""
    return {
        **this_machine(),
        DEVICE: world.device_type,
        RANKS: world.size,
        PROCESSES: world.processes,
        THREADS: torch.get_num_threads(),
    }


def measured(
    world: World,
    compiled: Iterable[Compiled],
    optimizers: Optimizers,
    patience: Patience = Patience(),  # frozen
    begun: Callable[[str], object] = lambda _: None,
) -> Measurements:
    """Seconds of what programs run, the same on all ranks; every process must call it.

    Args:
        begun: is told what is measured, on the first rank.
    """
    told = begun if 0 in world.ranks else _nothing
    programs = tuple(compiled)
    held = _held(world, programs)
    found = _of_calls(world, programs, optimizers, patience, told)
    sent = _of_exchanges(world, told, held, _largest(world, programs))
    found = replace(found, exchanges=sent.exchanges, slowdown=sent.slowdown, memory=_memory(world))
    told("acts and steps")
    return with_overheads(world, found, patience, held)


def _memory(world: World) -> Bytes:
    """The bytes that a rank may hold: those of its GPU, or its part of the host's."""
    if world.device_type == "cuda":
        return Bytes(torch.cuda.mem_get_info(world.device(world.ranks[0]))[1])
    return Bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.size)


def with_overheads(
    world: World, found: Measurements, patience: Patience, held: Bytes
) -> Measurements:
    """Measurements with the overheads of acts, exchanges and steps, the same on all ranks.

    Args:
        found: with the exchanges.
        held: bytes that a step holds.
    """
    program, batch = tiny_program(world)
    compiled, optimizers = program._core.variants.current.compiled, program._core.step.optimizers
    own = _of_calls(world, (compiled,), optimizers, patience, _nothing)
    seen = overheads(program, batch, replace(own, exchanges=found.exchanges))
    program.close()
    if held > _CACHED:
        program, batch = filling_program(world, held)
        seen = replace(seen, step=frame(program, batch))
        program.close()
    text = json.dumps([seen.act, seen.exchange, seen.step])
    every = [
        Overheads(*json.loads(each)) for each in world.gather(dict.fromkeys(world.ranks, text))
    ]
    ours = middle(every)
    return replace(found, act=ours.act, exchange=ours.exchange, step=ours.step)


def _held(world: World, compiled: Iterable[Compiled]) -> Bytes:
    """The bytes that a step of programs holds on the rank with most, at most as many as no cache holds.

    The same on all ranks, of which each knows the peaks of its own plans: stages of a pipeline hold more or less.
    """
    peaks = (peak.memory.peak for each in compiled for peak in each.peaks)
    own = min(COLD, max(peaks, default=COLD))
    return Bytes(max(map(int, world.gather(dict.fromkeys(world.ranks, str(own))))))


def _of_calls(
    world: World,
    compiled: Sequence[Compiled],
    optimizers: Optimizers,
    patience: Patience,
    told: Callable[[str], object],
) -> Measurements:
    """The calls and updates of programs, by all ranks at the same time."""
    facts = machine_of(world)
    held = _held(world, compiled)
    meetings = world.connect([Communicator(0, tuple(range(world.size)))])

    def one(rank: int) -> str:
        own = [each for c in compiled for each in c.programs if each.rank == rank]
        joined = [replace(each, nodes=_with_joined_sums(each)) for each in own]
        device, begun = world.device(rank), told if rank == 0 else _nothing
        calls = calls_in_order([*own, *joined])
        channel = meetings[rank][0]
        channel.barrier()
        seen, drift = measured_calls(calls, _as_run(world), device, patience.call, held, begun)
        updates = {
            type(each).__name__: measured_updates(
                each, device, patience.update, channel.barrier, held
            )
            for each in optimizers.each
        }
        channel.close()
        return to_json(Measurements(facts, seen, updates, drift=drift))

    texts = dict(zip(world.ranks, world.run(one), strict=True))
    return together([from_json(text, "another rank") for text in world.gather(texts)])


def _largest(world: World, compiled: Iterable[Compiled]) -> dict[CollectiveKind, Bytes]:
    """The bytes that collectives of programs have at most on any rank, by kind; those that run as one together."""
    text = json.dumps(_own_largest(compiled))
    found: dict[CollectiveKind, Bytes] = {}
    for each in world.gather(dict.fromkeys(world.ranks, text)):
        for kind, size in json.loads(each).items():
            found[kind] = max(found.get(kind, NO_BYTES), Bytes(size))
    return found


def _own_largest(compiled: Iterable[Compiled]) -> dict[CollectiveKind, Bytes]:
    found: dict[CollectiveKind, Bytes] = {}
    for plan in (plan for each in compiled for plan in each.plan.ranks):
        for actor in plan.actors:
            if isinstance(actor, Communicate) and isinstance(actor.collectives[0], Collective):
                size = joined_size(actor.collectives)
                kind = actor.collectives[0].kind
                found[kind] = max(found.get(kind, NO_BYTES), size)
    return found


def _of_exchanges(
    world: World,
    told: Callable[[str], object],
    held: Bytes,
    largest: Mapping[CollectiveKind, Bytes],
) -> Measurements:
    """Exchanges of all ranks, and of pairs of them at the same time; how long they and calls take beside each other."""
    facts, connected = machine_of(world), [world.connect(groups) for groups in _groups(world.size)]

    def one(rank: int) -> str:
        begun = told if rank == 0 else _nothing
        found = Measurements(facts)
        for channel in (each for channels in connected for each in channels[rank].values()):
            if channel.size > 1:
                seen = measured_exchanges(channel, begun, held, largest)
                found = replace(found, exchanges={**found.exchanges, **seen})
            if channel.size == world.size > 1:
                found = replace(found, slowdown=slowdown(channel))
            channel.close()
        return to_json(found)

    texts = dict(zip(world.ranks, world.run(one), strict=True))
    every = [from_json(text, "another rank") for text in world.gather(texts)]
    slower = zip(*(each.slowdown for each in every), strict=True)
    return replace(every[0], slowdown=Slowdown(*map(median, slower)))


def _groups(ranks: int) -> Iterator[list[Communicator]]:
    """All ranks as one group, and, where these are more, in groups of two that exchange at the same time."""
    yield [Communicator(0, tuple(range(ranks)))]
    if ranks > 2:
        firsts = range(0, ranks - 1, 2)
        yield [Communicator(number, (one, one + 1)) for number, one in enumerate(firsts)]


def _nothing(_: str) -> None:
    """Only the first rank tells what it does."""


def _as_run(world: World) -> Callable[[LocalCall], LocalCall]:
    target = Target(world.device_type, onednn_is_faster())
    return lambda call: variant(call, target)


def _with_joined_sums(program: LocalProgram) -> tuple[LocalNode, ...]:
    """The calls with sums of products as they may run: in one."""
    calls = [node for node in program.nodes if isinstance(node, LocalCall)]
    others = [node for node in program.nodes if not isinstance(node, LocalCall)]
    return *others, *join_sums(calls, [output.name for output in program.outputs])[0]


def together(ranks: Sequence[Measurements]) -> Measurements:
    """The figures of all ranks: of each call the median over those that measured it; exchanges are the same on all."""
    calls: dict[str, list[Sample]] = {}
    for each in ranks:
        for text, sample in each.calls.items():
            calls.setdefault(text, []).append(sample)
    joined = {text: _middle(samples) for text, samples in calls.items()}
    drift = median(each.drift for each in ranks)
    return replace(ranks[0], calls=joined, updates=_middle_sized(ranks), drift=drift)


def _middle(samples: Sequence[Sample]) -> Sample:
    seconds = Seconds(median(each.seconds for each in samples))
    return Sample(seconds, median(each.spread for each in samples), samples[0].usual)


def _middle_sized(ranks: Sequence[Measurements]) -> Mapping[str, tuple[SizedSample, ...]]:
    """Of updates, the median over ranks, size by size."""
    return {
        rule: tuple(
            SizedSample(
                at[0].bytes, Seconds(median(x.seconds for x in at)), median(x.spread for x in at)
            )
            for at in zip(*(each.updates[rule] for each in ranks), strict=True)
        )
        for rule in ranks[0].updates
    }
