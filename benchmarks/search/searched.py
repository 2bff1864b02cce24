"""weft with `strategy="auto"` as a system of the benchmarks, on costs that its ranks have measured before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import weft
from benchmarks.accuracy_here import STRATEGIES, fits
from benchmarks.systems import own
from benchmarks.systems.system import Job, System
from weft.errors import WeftError
from weft.hardware.measured_store import store_measurements, stored_measurements
from weft.program.profiling.typical_steps import measured_job, measured_machine
from weft.runtime.world.distributed import current_world
from weft.strategy.parts import zero_rules
from weft.strategy.text import SBPs, sbps_of

# Strategies that a search runs before it takes one.
MEASURED = 6


def hand_strategies(job: Job) -> list[str]:
    """The names of the strategies of all ranks that say something about a work."""
    return [each for each in STRATEGIES if each != "single" and fits(job.work, each)]


def measuring(job: Job) -> System:
    """No system: measures the machine once, and the calls of all hand strategies of a work, and keeps them."""
    world = current_world()
    if not stored_measurements():
        _keep(measured_machine(world))
    for strategy in hand_strategies(job):
        planned = own.strategy(replace(job, strategy=strategy))
        try:
            _keep(measured_job(world, _job_of(job), planned))
        except WeftError as error:  # the same on all ranks
            if job.rank == 0:
                print(f"  {strategy}: {error}", flush=True)
    return System(lambda: 0.0)


def _keep(found: Any) -> None:
    if 0 in current_world().ranks:
        store_measurements(found)


def _job_of(job: Job) -> weft.Job:
    model = job.work.model()
    optimizer = job.work.optimizer(model.parameters())
    return weft.Job(model, job.work.loss_fn, optimizer, job.work.batch())


def auto(seconds: float, limit: int | None = None) -> partial[System]:
    """What makes the system of one rank: its strategy is searched for so many seconds, under a limit of bytes."""
    return partial(_auto, seconds=seconds, limit=limit)


def _auto(job: Job, seconds: float, limit: int | None) -> System:
    made = _job_of(job)
    batch = made.example_batch
    program = weft.compile(
        *(made.model, made.loss_fn, made.optimizer, batch),
        placement=weft.placement("cpu", range(job.ranks)),
        strategy=weft.Auto(seconds=seconds, memory_limit=limit, measure=MEASURED),
    )

    def peak() -> int:
        measured = program.memory()[job.rank].measured
        assert measured is not None
        return measured.peak

    return System(lambda: float(program.step(batch)), peak, program.close, lambda: _chosen(program))


def _chosen(program: weft.Program) -> Mapping[str, Any]:
    return {"strategy": ", ".join(in_words(program.strategy))}


def in_words(strategy: weft.Strategy) -> Iterator[str]:
    """What a strategy decides, entry by entry, short."""
    yield f"grid {'x'.join(map(str, strategy.grid))}"
    if strategy.stages:
        count = strategy.stages if isinstance(strategy.stages, int) else len(strategy.stages)
        yield f"{count} stages"
    if strategy.micro_batches > 1:
        yield f"{strategy.micro_batches} micro-batches {strategy.schedule or ''}".rstrip()
    if strategy.in_flight:
        yield f"in flight {' '.join(map(str, strategy.in_flight))}"
    rules = zero_rules(strategy.zero)
    for pattern, zero in rules[:4]:
        where = f" {pattern}" if len(rules) > 1 else ""
        yield f"ZeRO {zero.level if zero is not None else 0}{where}"
    laid = {name: text for name, text in strategy.parameters.items() if name != "*"}
    yield from (f"{name} {_text(sbps)}" for name, sbps in list(laid.items())[:4])
    if not strategy.parameters:
        yield "parameters as deduced"
    yield from (f"{each} again" for each in strategy.recompute)
    if strategy.signatures:
        yield f"{len(strategy.signatures)} signatures"


def _text(sbps: SBPs) -> str:
    return " ".join(map(str, sbps_of(sbps)))
