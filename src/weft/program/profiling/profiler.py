"""Measure what a program runs, on the ranks that run it: its distinct calls, its optimizers' updates, its exchanges."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from weft.capture.optimizer_groups import Optimizers
from weft.compiler.pipeline import Compiled
from weft.compiler.plans.specialize import Target, join_sums, variant
from weft.hardware import default_device
from weft.hardware.costs import Contention
from weft.hardware.durations import joined_size
from weft.hardware.measured_costs import (
    DEVICE,
    PROCESSES,
    RANKS,
    THREADS,
    MeasuredCosts,
    Measurements,
    Sample,
    SizedSample,
    from_json,
    to_json,
)
from weft.hardware.measured_store import this_machine
from weft.ir.plan import (
    Collective,
    CollectiveKind,
    Communicate,
    Communicator,
    Compute,
    LocalCall,
)
from weft.layout import Placement
from weft.program.compile import compile
from weft.program.inspect.inspection import planned_as_run
from weft.program.program import Program
from weft.runtime.kernels.dense_operands import onednn_is_faster
from weft.runtime.profiling.call_times import COLD, calls_in_order, measured_calls, measured_updates
from weft.runtime.profiling.exchange_times import contention, measured_exchanges
from weft.runtime.recording import Span
from weft.runtime.world.world import World
from weft.simulator.acts import act_costs
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import NO_BYTES, NO_TIME, Bytes, Seconds

# A step that holds no more leaves the caches to what the host does.
_CACHED = Bytes(2**20)


@final
@dataclass(frozen=True)
class Patience:
    """Seconds to measure one local call, and the updates of one size, for, at least."""

    call: float = 0.03
    update: float = 0.05


def measured_machine_of(world: World) -> dict[str, str | int]:
    """The facts of this machine and process that measurements hold for."""
    return {
        **this_machine(),
        DEVICE: world.device_type,
        RANKS: world.size,
        PROCESSES: world.processes,
        THREADS: torch.get_num_threads(),
    }


def measured_costs(
    world: World,
    compiled: Iterable[Compiled],
    optimizers: Optimizers,
    patience: Patience = Patience(),  # frozen
    begun: Callable[[str], object] = lambda _: None,
) -> Measurements:
    """Seconds of what programs run, the same on all ranks, which all must call it; `begun` is told what is measured."""
    told = begun if 0 in world.ranks else _nothing
    programs = tuple(compiled)
    held = _held(world, programs)
    found = _of_calls(world, programs, optimizers, patience, told)
    sent = _of_exchanges(world, told, held, _largest(world, programs))
    # The bytes that a rank may hold: those of its GPU, or its part of the host's.
    if world.device_type == "cuda":
        memory = torch.cuda.mem_get_info(world.device(world.ranks[0]))[1]
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.size
    found = replace(found, exchanges=sent.exchanges, slowdown=sent.slowdown, memory=Bytes(memory))
    told("acts and steps")
    return with_overheads(world, found, patience, held)


def with_overheads(
    world: World, found: Measurements, patience: Patience, held: Bytes
) -> Measurements:
    """Measurements (with exchanges) and the overheads of acts, exchanges and steps, which hold `held` bytes."""
    program, batch = tiny_program(world)
    compiled, optimizers = program._core.variants.current.compiled, program._core.step.optimizers
    own = _of_calls(world, (compiled,), optimizers, patience, _nothing)
    seen = overheads(program, batch, replace(own, exchanges=found.exchanges))
    program.close()
    if held > _CACHED:
        program, batch = filling_program(world, held)
        seen = seen._replace(step=step_overhead(program, batch))
        program.close()
    texts = world.gather(dict.fromkeys(world.ranks, json.dumps(seen)))
    ours = middle([Overheads(*json.loads(each)) for each in texts])
    return replace(found, **ours._asdict())


def _held(world: World, compiled: Iterable[Compiled]) -> Bytes:
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
    facts = measured_machine_of(world)
    held = _held(world, compiled)
    meetings = world.connect([Communicator(0, tuple(range(world.size)))])

    target = Target(world.device_type, onednn_is_faster())

    def as_run(call: LocalCall) -> LocalCall:
        return variant(call, target)

    def one(rank: int) -> str:
        own = [each for c in compiled for each in c.programs if each.rank == rank]
        joined = []
        for each in own:  # with sums of products as they may run: in one
            made = [node for node in each.nodes if isinstance(node, LocalCall)]
            others = [node for node in each.nodes if not isinstance(node, LocalCall)]
            sums, *_ = join_sums(made, [output.name for output in each.outputs])
            joined.append(replace(each, nodes=(*others, *sums)))
        device, begun = world.device(rank), told if rank == 0 else _nothing
        calls = calls_in_order([*own, *joined])
        channel = meetings[rank][0]
        channel.barrier()
        seen, drift = measured_calls(calls, as_run, device, patience.call, held, begun)
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
    own = {
        (actor.collectives[0].kind, joined_size(actor.collectives))
        for each in compiled
        for plan in each.plan.ranks
        for actor in plan.actors
        if isinstance(actor, Communicate) and isinstance(actor.collectives[0], Collective)
    }
    found: dict[CollectiveKind, Bytes] = {}
    for text in world.gather(dict.fromkeys(world.ranks, json.dumps(sorted(own)))):
        for kind, size in json.loads(text):
            found[kind] = max(found.get(kind, NO_BYTES), Bytes(size))
    return found


def _of_exchanges(
    world: World,
    told: Callable[[str], object],
    held: Bytes,
    largest: Mapping[CollectiveKind, Bytes],
) -> Measurements:
    """Exchanges of all ranks, and of pairs of them at the same time; how long they and calls take beside each other."""
    # All ranks as one group, and, where these are more, in groups of two that exchange at the same time.
    groups = [[Communicator(0, tuple(range(world.size)))]]
    if world.size > 2:
        firsts = enumerate(range(0, world.size - 1, 2))
        groups.append([Communicator(number, (one, one + 1)) for number, one in firsts])
    facts, connected = measured_machine_of(world), [world.connect(each) for each in groups]

    def one(rank: int) -> str:
        begun = told if rank == 0 else _nothing
        found = Measurements(facts)
        for channel in (each for channels in connected for each in channels[rank].values()):
            if channel.size > 1:
                seen = measured_exchanges(channel, begun, held, largest)
                found = replace(found, exchanges={**found.exchanges, **seen})
            if channel.size == world.size > 1:
                found = replace(found, slowdown=contention(channel))
            channel.close()
        return to_json(found)

    texts = dict(zip(world.ranks, world.run(one), strict=True))
    every = [from_json(text, "another rank") for text in world.gather(texts)]
    slower = zip(*(each.slowdown for each in every), strict=True)
    return replace(every[0], slowdown=Contention(*map(median, slower)))


def _nothing(_: str) -> None:
    """Only the first rank tells what it does."""


def together(ranks: Sequence[Measurements]) -> Measurements:
    """The figures of all ranks: of each call the median over those that measured it; exchanges are the same on all."""
    calls: dict[str, list[Sample]] = {}
    for each in ranks:
        for text, sample in each.calls.items():
            calls.setdefault(text, []).append(sample)
    joined = {
        text: Sample(Seconds(_median(every, "seconds")), _median(every, "spread"), every[0].usual)
        for text, every in calls.items()
    }
    updates = {
        rule: tuple(
            SizedSample(at[0].bytes, Seconds(_median(at, "seconds")), _median(at, "spread"))
            for at in zip(*(each.updates[rule] for each in ranks), strict=True)
        )
        for rule in ranks[0].updates
    }
    drift = median(each.drift for each in ranks)
    return replace(ranks[0], calls=joined, updates=updates, drift=drift)


def _median(samples: Sequence[Sample | SizedSample], figure: str) -> float:
    found: float = median(getattr(each, figure) for each in samples)
    return found


# Overheads of the host: what acts, exchanges and steps of a tiny program take beyond its calls and exchanges.

# Steps that are ignored, and those that are.
_FIRST, _STEPS = 10, 60
_WIDTH, _MICRO_BATCHES = 4, 4


@final
class Overheads(NamedTuple):
    """Seconds of the host.

    Attributes:
        act: for an act, beyond its calls.
        exchange: for an act of a communicator, beyond the exchange.
        step: between the acts of one step and those of the next.
    """

    act: Seconds = NO_TIME
    exchange: Seconds = NO_TIME
    step: Seconds = NO_TIME


def tiny_program(world: World) -> tuple[Program, Tensor]:
    """A program whose calls take next to no time, with the batch that it takes; every process must call it."""
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
    return _compiled(world, model, _mean, _MICRO_BATCHES)


def filling_program(world: World, held: Bytes) -> tuple[Program, Tensor]:
    """A small program that reads a number of bytes on each rank, to fill the caches between steps.

    Every process must call it.
    """
    model = nn.Linear(_WIDTH, 1)
    model.register_buffer("rest", torch.zeros(world.size * held // 4))
    return _compiled(world, model, _mean_beside, 1)


def _compiled(
    world: World, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], micro_batches: int
) -> tuple[Program, Tensor]:
    batch = torch.ones(micro_batches * world.size, _WIDTH)
    strategy = Strategy(batch=data_parallel().batch, micro_batches=micro_batches)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    placement = Placement(world.device_type, (world.size,), tuple(range(world.size)))
    return compile(model, loss, optimizer, batch, placement=placement, strategy=strategy), batch


def _mean(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def _mean_beside(model: nn.Module, batch: Any) -> Tensor:
    rest: Tensor = model.rest  # type: ignore[assignment]  # a buffer
    return _mean(model, batch) + rest.sum()


def step_overhead(program: Program, batch: Tensor) -> Seconds:
    """Seconds of the host between the acts of one step and those of the next, as the first rank here sees them.

    All ranks must call it together.
    """
    return Seconds(max(0.0, median(took - _inside(x) for took, x in _steps(program, batch))))


def _steps(program: Program, batch: Tensor) -> Iterator[tuple[float, list[Span]]]:
    """Some steps: the seconds of each as its caller sees them, and its acts that take time, in order."""
    executor = next(iter(program._core.executors.values()))
    # All but what feeds and fetches.
    work = {a.id for a in executor.plan.actors if isinstance(a, Compute | Communicate)}
    for number in range(_FIRST + _STEPS):
        begin = perf_counter_ns()
        program.step(batch)
        took = (perf_counter_ns() - begin) / 1e9
        if number >= _FIRST:
            spans = (each for each in executor.recorder.record().spans if each[0].actor in work)
            yield took, sorted(spans, key=lambda span: span[1])


def _inside(spans: Sequence[Span]) -> float:
    return (max(span[2] for span in spans) - spans[0][1]) / 1e9


def overheads(program: Program, batch: Tensor, measured_costs: Measurements) -> Overheads:
    """The overheads in steps of a program, given the costs of its calls and exchanges. All ranks must call it."""
    variant = program._core.variants.current
    step = planned_as_run(variant.captured.graph, variant.compiled)
    costs = MeasuredCosts(measured_costs, default_device(program.placement.device_type))
    rank, executor = next(iter(program._core.executors.items()))
    stands = variant.compiled.schedule.classes.get(rank, step.plans[0].rank)
    # Seconds of acts by their calls and exchanges.
    calls = dict(enumerate(act_costs(step, costs).seconds(stands)))
    computes = {actor.id for actor in executor.plan.actors if isinstance(actor, Compute)}
    steps = _steps(program, batch)
    return middle([_of_step(spans, calls, computes, took) for took, spans in steps])


def _of_step(
    spans: Sequence[Span], calls: Mapping[int, Seconds], computes: Container[int], took: float
) -> Overheads:
    own = [span for span in spans if span[0].actor in computes]
    exchanges = len(spans) - len(own)
    # From one act to the next in the same loop nothing was waited for.
    apart = [
        (after[1] - span[1]) / 1e9 - calls[span[0].actor]
        for span, after in pairwise(own)
        if after[0].actor == span[0].actor
    ]
    act = median([*apart, 0.0])
    inside = _inside(spans)
    known = sum(calls[span[0].actor] for span in spans) + act * len(own)
    exchange = (inside - known) / exchanges if exchanges else 0.0
    return Overheads(Seconds(act), Seconds(exchange), Seconds(took - inside))


def middle(each: Sequence[Overheads]) -> Overheads:
    """The medians; none below 0."""
    return Overheads(*(Seconds(max(0.0, median(figures))) for figures in zip(*each, strict=True)))
