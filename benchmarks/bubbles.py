"""What weft's pipeline schedules leave idle: in theory, as simulated when compiling, and as measured.

    OMP_NUM_THREADS=1 PYTHONPATH=. weft run -n 2 benchmarks/bubbles.py

The bubble is the part of a step in which a rank's compute queue does nothing; in theory it is that of
the schedule with equal stages. `benchmarks.compare` has the step times beside torch's schedules.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import tensor

import weft
from benchmarks.measure import save
from benchmarks.systems.system import Job
from benchmarks.works.table import TINY, WORKS
from weft.compiler.schedule.presets import PRESETS
from weft.ir.plan import COMPUTE

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
# Stages have ranks of their own.
SCHEDULES = ("computed", *(name for name, row in PRESETS.items() if not row.takes_turns))


def theory(schedule: str, micro_batches: int) -> float:
    """The schedule's bubble when all stages and parts of them take as long and communication nothing.

    GPipe and 1F1B: (p - 1) / (m + p - 1) (Narayanan et al., arXiv 2104.04473); a backward split in
    two, ZB-H1: (p - 1) / (3 m + p - 1) (Qi et al., arXiv 2401.10241, section 2).
    """
    splits = {"computed"} | {name for name, row in PRESETS.items() if row.splits_weights}
    parts = 3 if schedule in splits else 1
    return (RANKS - 1) / (parts * micro_batches + RANKS - 1)


def simulated(program: weft.Program) -> float:
    """The same part as the simulation of the plan says it."""
    scheduled = program._core.compiled.schedule
    simulation = scheduled.simulation
    assert simulation is not None
    makespan: float = simulation.makespan
    busy: list[float] = [
        each.end - each.start
        for plan in scheduled.plans
        for each in simulation.timelines[plan.rank]
        if plan.actors[each.actor].queue == COMPUTE
    ]
    return 1 - sum(busy) / (makespan * len(scheduled.plans))


class Busy:
    """Seconds that the compute queue of this rank works, in all steps since `clear`."""

    def __init__(self, program: weft.Program) -> None:
        self.seconds = 0.0
        # The executor's own dict: it looks an actor's work up for every act.
        executor: Any = program._core.executors[RANK]
        works = executor._works
        for actor in program.plan.ranks[0].actors:
            if actor.queue == COMPUTE:
                works[actor.id] = replace(works[actor.id], act=self._timed(works[actor.id].act))

    def _timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            made = act(*arguments)
            self.seconds += time.perf_counter() - start
            return made

        return timed

    def clear(self) -> None:
        self.seconds = 0.0


def measured(program: weft.Program, step: Callable[[], object], steps: int) -> float:
    """The part of a step in which ranks do not compute, over all of them; the median of some steps."""
    step()  # measures memory, and so is slow
    busy = Busy(program)
    found = []
    for _ in range(steps):
        dist.barrier()
        busy.clear()
        start = time.perf_counter()
        step()
        total = tensor([busy.seconds, time.perf_counter() - start])
        dist.all_reduce(total)
        found.append(1 - float(total[0] / total[1]))
    return statistics.median(found)


def bubbles(job: Job, schedule: str, steps: int) -> dict[str, float]:
    """The three figures of a schedule, each a part of a step."""
    strategy = weft.Strategy(
        stages=job.ranks,
        micro_batches=job.micro_batches,
        schedule=None if schedule == "computed" else schedule,  # type: ignore[arg-type]  # one of SCHEDULES
    )
    model, batch = job.work.model(), job.work.batch()
    optimizer = job.work.optimizer(model.parameters())
    placement = weft.placement("cpu", range(job.ranks))
    program = weft.compile(
        model, job.work.loss_fn, optimizer, batch, placement=placement, strategy=strategy
    )
    found = {
        "in_theory": theory(schedule, job.micro_batches),
        "simulated": simulated(program),
        "measured": measured(program, lambda: program.step(batch), steps),
    }
    program.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", choices=WORKS, default="gpt8")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    o = parser.parse_args()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    work = (TINY if o.tiny else WORKS)[o.work]
    job = Job(o.work, work, "pipeline", RANK, RANKS, o.micro_batches)
    found = {schedule: bubbles(job, schedule, o.steps) for schedule in o.schedules}
    if RANK == 0:
        bound = "measured <= in_theory + 0.05"
        save("bubbles", {**vars(o), "ranks": RANKS, "bubbles": found, "bound": bound})


if __name__ == "__main__":
    main()
