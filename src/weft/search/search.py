"""`weft.search`: the fastest strategy of a step on a machine, under a limit of memory, with a bound for all others.

Strategies are points of a space (`weft.search.space`). Floors say what each takes at least, estimates in which order
they are worth a look; each that could still be the best is planned and simulated as `weft.simulate` does it. A floor
at or above the best is a proof that a point need not be planned. Whatever time is left goes to signatures of single
groups of ops (`weft.search.signatures`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from weft.errors import UserError
from weft.hardware.topology import Topology
from weft.planning.machine import HERE, Machine, machine_of
from weft.planning.simulated import Capturable, as_stored
from weft.planning.stored_step import StoredStep
from weft.search.budget import Budget
from weft.search.enumeration import Enumeration
from weft.search.evaluator import Evaluator
from weft.search.facts import StepFacts
from weft.search.fixed import fits, hand_only
from weft.search.floors import Floors
from weft.search.result import SearchResult
from weft.search.signatures import improved
from weft.search.space import Point, Sizes, points, ranks_used
from weft.strategy.strategy import Strategy, data_parallel

Told: TypeAlias = Callable[["Enumeration"], None]

NOT_SEARCHED = (
    "stages of named modules, expert parallelism, offload, halves of precision: as `fixed` says them",
    "copies of registers: as planning gives them",
)


def search(
    step: StoredStep | Capturable | str | Path,
    topology: str | Path | Topology | Machine = HERE,
    *,
    seconds: float = 60.0,
    fixed: Strategy | None = None,
    start: Strategy | None = None,
    memory_limit: int | None = None,
    seed: int = 0,
    moves: int | None = None,
    every_rank: bool = False,
    told: Told = lambda _: None,
) -> SearchResult:
    """Search the fastest strategy of a step on a machine.

    Equal arguments with `moves` give equal results on any machine; with `seconds`, as far as it gets.

    Args:
        step: the path of a graph file; or a `weft.Job`, `weft.Step` or `weft.Program`.
        topology: the machine, as `weft.simulate` takes it.
        seconds: that the search may take.
        fixed: entries that are set hold for every strategy; the others are searched. Of a graph file its precision
            holds, too.
        start: a strategy that is tried first.
        memory_limit: bytes of a device that a rank may take, with what the device reserves; by default what it has.
        seed: of what is drawn.
        moves: how many strategies are planned at most, in place of seconds.
        every_rank: true where all devices must take part; by default fewer may, where that is quicker.
        told: is told what is known, after each strategy.

    Raises:
        UserError: an argument is no such, the topology is unknown, or no strategy fits the memory.
        CaptureError: the step cannot be one graph.
    """
    budget = Budget.of(seconds, moves)
    machine = machine_of(topology)
    stored = as_stored(step, fixed or data_parallel())
    base = stored.in_precision(fixed or Strategy())
    ranks = tuple(range(machine.devices))
    facts = StepFacts(stored, machine, base)
    found = Enumeration(
        Evaluator(stored, machine, ranks),
        Floors(facts, machine.costs, ranks, _limit(machine, memory_limit)),
        facts,
        budget,
    )
    for name, strategy in (("start", start), ("fixed", base if hand_only(base) else None)):
        if strategy is not None:
            found.plan(name, strategy)
            told(found)
    if not hand_only(base):
        for point in found.ordered(_space(facts, base, ranks, every_rank)):
            if not found.try_point(point):
                break
            told(found)
    improved(found, stored, seed, told)
    return found.result(NOT_SEARCHED)


def _space(facts: StepFacts, base: Strategy, ranks: Sequence[int], every_rank: bool) -> list[Point]:
    """The points that keep what is fixed."""
    sizes = Sizes(
        (len(ranks),) if every_rank else ranks_used(len(ranks)),
        facts.samples,
        facts.blocks.count if facts.blocks is not None else 1,
        bool(facts.linears.rows),
        facts.positions,
    )
    return [point for point in points(sizes) if fits(point, base)]


def _limit(machine: Machine, asked: int | None) -> int | None:
    """Bytes of the smallest device."""
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise UserError(
                f"weft.search: memory_limit takes bytes, a whole number from 1, found {asked!r}"
            )
        return asked
    known = [machine.costs.capacity(rank).memory for rank in range(machine.devices)]
    return min((each for each in known if each is not None), default=None)
