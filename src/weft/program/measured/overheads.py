"""Overheads of the host: what acts, exchanges and steps of a tiny program take beyond its calls and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.hardware import usual_device
from weft.hardware.measured import MeasuredCosts, Measurements
from weft.ir.plan import Communicate, Compute, RankPlan
from weft.layout import Placement
from weft.program.compile import compile
from weft.program.parts.inspection import planned_as_run
from weft.program.program import Program
from weft.runtime.recording import Span
from weft.runtime.world.world import World
from weft.simulator.steps.acts import act_costs
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import NO_TIME, Bytes, Seconds

# Steps that are not looked at, and those that are.
_FIRST, _STEPS = 10, 60
_WIDTH, _MICRO_BATCHES = 4, 4


@final
@dataclass(frozen=True)
class Overheads:
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
    """A program as small that reads so many bytes on each rank: what the host does between steps finds the caches full.

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


def frame(program: Program, batch: Tensor) -> Seconds:
    """Seconds of the host between the acts of one step and those of the next, as the first rank here sees them.

    All ranks must call it together.
    """
    executor = next(iter(program._core.executors.values()))
    each = []
    for number in range(_FIRST + _STEPS):
        took = _step(program, batch)
        if number >= _FIRST:
            each.append(took - _inside(_working(executor.plan, executor.recorder.record().spans)))
    return Seconds(max(0.0, median(each)))


def _step(program: Program, batch: Tensor) -> float:
    """Seconds of a step, as its caller sees them."""
    begin = perf_counter_ns()
    program.step(batch)
    return (perf_counter_ns() - begin) / 1e9


def _working(plan: RankPlan, spans: Iterable[Span]) -> list[Span]:
    """The spans of what takes time in plans, in order: all but what feeds and fetches."""
    work = {actor.id for actor in plan.actors if isinstance(actor, Compute | Communicate)}
    return sorted((span for span in spans if span[0].actor in work), key=lambda span: span[1])


def _inside(spans: Sequence[Span]) -> float:
    """Seconds from the first to the last."""
    return (max(span[2] for span in spans) - spans[0][1]) / 1e9


def overheads(program: Program, batch: Tensor, measured: Measurements) -> Overheads:
    """The overheads that steps of a program show, as the first rank of this process sees them.

    All ranks must call it together.

    Args:
        measured: its calls and exchanges.
    """
    variant = program._core.variants.current
    step = planned_as_run(variant.captured.graph, variant.compiled)
    costs = MeasuredCosts(measured, usual_device(program.placement.device_type))
    rank, executor = next(iter(program._core.executors.items()))
    stands = variant.compiled.schedule.classes.get(rank, step.plans[0].rank)
    calls = dict(enumerate(act_costs(step, costs).seconds(stands)))
    plan, recorder = executor.plan, executor.recorder
    computes = {actor.id for actor in plan.actors if isinstance(actor, Compute)}
    each: list[Overheads] = []
    for number in range(_FIRST + _STEPS):
        took = _step(program, batch)
        spans = _working(plan, recorder.record().spans)
        if number >= _FIRST:
            each.append(_of_step(spans, calls, computes, took))
    return middle(each)


def _of_step(
    spans: Sequence[Span], calls: Mapping[int, Seconds], computes: Container[int], took: float
) -> Overheads:
    """The overheads of one step.

    Args:
        spans: of its acts that take time, in order.
        calls: what acts take by their calls and exchanges, by actor.
        computes: the actors that are no communication.
        took: seconds of the step, as its caller sees them.
    """
    own = [span for span in spans if span[0].actor in computes]
    exchanges = len(spans) - len(own)
    act = median([*_apart(own, calls), 0.0])
    inside = _inside(spans)
    known = sum(calls[span[0].actor] for span in spans) + act * len(own)
    exchange = (inside - known) / exchanges if exchanges else 0.0
    return Overheads(Seconds(act), Seconds(exchange), Seconds(took - inside))


def _apart(spans: Sequence[Span], calls: Mapping[int, Seconds]) -> Iterator[float]:
    """Seconds from one act to the next in the same loop, beyond its calls: nothing was waited for between these."""
    for span, after in pairwise(spans):
        if after[0].actor == span[0].actor:
            yield (after[1] - span[1]) / 1e9 - calls[span[0].actor]


def middle(each: Sequence[Overheads]) -> Overheads:
    """The medians; none below 0."""
    return Overheads(
        Seconds(max(0.0, median(one.act for one in each))),
        Seconds(max(0.0, median(one.exchange for one in each))),
        Seconds(max(0.0, median(one.step for one in each))),
    )
