"""How long a search takes by full and by delta evaluation, as FlexFlow's table 4, on its workloads.

    OMP_NUM_THREADS=1 python -m benchmarks.search.delta_time --only NMT RNNLM --devices 4 16 --moves 40

A Metropolis chain from data parallel draws its moves by a seed. It is made twice: with all passes and
tables anew for each strategy (full), and with what the passes keep (delta). Both must give the same seconds.
Times are the processor's, of planning and simulating alone.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from random import Random
from typing import final

import weft
from benchmarks.measure import machine
from benchmarks.models import stored
from benchmarks.search.workloads.table import WORKLOADS
from weft.compiler.context import PassCache
from weft.errors import UserError
from weft.planning.machine import Machine, machine_of, placement_on
from weft.planning.plans import plan_stored, priced_step
from weft.planning.progress import uncollected
from weft.planning.simulated import planned_step
from weft.planning.stored_step import StoredStep
from weft.search.bounds.lower_bounds import LowerBounds
from weft.search.budget import Budget
from weft.search.evaluation.evaluator import Evaluator
from weft.search.moves.neighbours import Neighbours
from weft.search.state import SearchState
from weft.search.steps.facts import StepFacts
from weft.search.tuning import TEMPERATURE
from weft.units import Seconds

# Results that each pass keeps, as in a search.
KEPT = 4


@final
@dataclass(frozen=True)
class Chain:
    """A chain of moves.

    Attributes:
        took: seconds of the processor in which its strategies were planned and simulated.
        found: seconds of a step after each move; None for a strategy that was refused.
    """

    took: float
    found: tuple[float | None, ...]


def seconds_of(step: StoredStep, strategy: weft.Strategy, on: Machine, kept: PassCache) -> Seconds:
    """Seconds of a step with a strategy.

    Raises:
        UserError: when it cannot be planned so.
    """
    placement = placement_on(on.device_type, on.devices, strategy)
    with uncollected():
        compiled = plan_stored(
            step, strategy, placement, kinds=on.kinds(placement.ranks), costs=on.planned, kept=kept
        )
        return priced_step(planned_step(step.graph, compiled, kept), on.costs).ran.step_seconds


def chain(step: StoredStep, on: Machine, moves: int, seed: int, kept: int) -> Chain:
    """A Metropolis chain from data parallel.

    Args:
        step: the workload.
        on: the machine.
        moves: that are planned.
        seed: of what is drawn.
        kept: results that each pass keeps; 0 for full evaluations.
    """
    facts = StepFacts(step, on, weft.Strategy())
    evaluator = Evaluator(step, on, facts.ranks)
    neighbours = Neighbours(SearchState(evaluator, LowerBounds(facts, None), Budget.of(1.0, moves)))
    strategy = replace(weft.data_parallel(), grid=(on.devices,))
    random, results = Random(seed), PassCache(kept)
    here, took, found = seconds_of(step, strategy, on, results), 0.0, list[float | None]()
    while len(found) < moves:
        other = neighbours.drawn(random, strategy).on(strategy)
        most = here * (1 - TEMPERATURE * log(1.0 - random.random()))
        if other == strategy:
            continue
        begin = time.process_time()
        try:
            seconds: Seconds | None = seconds_of(step, other, on, results)
        except UserError:
            seconds = None
        took += time.process_time() - begin
        found.append(seconds)
        if seconds is not None and seconds <= most:
            strategy, here = other, seconds
    return Chain(took, tuple(found))


@final
@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        workload: its name.
        topology: of the machine.
        moves: of the chain.
        refused: of them.
        full, delta: seconds of the processor of all of them.
        quicker: how many times as fast delta is.
    """

    workload: str
    topology: str
    moves: int
    refused: int
    full: float
    delta: float
    quicker: float


def row(name: str, cluster: str, devices: int, moves: int, seed: int) -> Row:
    """Both chains of a workload.

    Raises:
        SystemExit: they differ.
    """
    topology = f"flexflow-{cluster}x{devices}"
    step, on = stored(WORKLOADS[name].job(devices)), machine_of(topology)
    delta = chain(step, on, moves, seed, KEPT)
    full = chain(step, on, moves, seed, 0)
    if delta.found != full.found:
        raise SystemExit(f"{name} on {topology}: delta and full evaluations differ")
    refused = full.found.count(None)
    return Row(name, topology, moves, refused, full.took, delta.took, full.took / delta.took)


def main() -> None:
    """Print a line for each workload and number of devices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--cluster", choices=("p100", "k80"), default="p100")
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--moves", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="written after each row")
    o = parser.parse_args()
    rows = list[Row]()
    for devices in o.devices:
        for name in o.only:
            one = row(name, o.cluster, devices, o.moves, o.seed)
            rows.append(one)
            print(
                f"{one.workload} on {one.topology}: {one.moves} moves, {one.refused} refused; full {one.full:.1f} s, "
                f"delta {one.delta:.1f} s: {one.quicker:.1f} x as fast",
                flush=True,
            )
            if o.json:
                content = {"machine": machine(), "rows": [asdict(each) for each in rows]}
                o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
