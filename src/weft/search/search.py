"""`weft.search`: the fastest strategy of a step on a machine, under a limit of memory, with a bound for all others.

Strategies are candidates of a space (`weft.search.space`). Lower bounds say how long each
takes at least, estimates order them; each that could still be the best is planned and simulated as `weft.simulate` does
it. A lower bound at or above the best is a proof that a candidate need not be planned. Moves from the best reach
strategies outside the space (`weft.search.moves`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from weft.errors import UserError, check, is_whole, wrong
from weft.hardware.measured_store import cores
from weft.hardware.topology import Topology
from weft.planning.machine import HERE, Machine, machine_of
from weft.planning.plans import CapturableStep, as_stored
from weft.planning.progress import passed_over
from weft.planning.stored_step import StoredStep
from weft.search.budget import Budget
from weft.search.enumeration import Enumeration
from weft.search.evaluator import Evaluator
from weft.search.lower_bounds import LowerBounds
from weft.search.moves.local_search import improve
from weft.search.planners import Planners
from weft.search.record import Learned, SearchRecord
from weft.search.result import SearchResult
from weft.search.space import is_planned_as_is, space_of, with_fixed
from weft.search.state import SearchState, Told
from weft.search.steps.facts import StepFacts
from weft.strategy.strategy import Strategy, data_parallel
from weft.tracebacks import shortened

# Each keeps the step and what its last plans can use again.
_MOST_PLANNERS = 7
IDLE = "the start: fewer ranks take part than must"


@shortened
def search(
    step: StoredStep | CapturableStep | str | Path,
    topology: str | Path | Topology | Machine = HERE,
    *,
    seconds: float = 60.0,
    fixed: Strategy | None = None,
    start: Strategy | SearchResult | SearchRecord | None = None,
    memory_limit: int | None = None,
    seed: int = 0,
    moves: int | None = None,
    every_rank: bool = False,
    planners: int | None = None,
    told: Told = lambda _: None,
) -> SearchResult:
    """Search the fastest strategy of a step on a machine.

    Equal arguments with `moves` give equal results on any machine; with `seconds`, as far as the time allows.

    Args:
        step: the path of a graph file; or a `weft.Job`, `weft.Step` or `weft.Program`.
        topology: the machine, as `weft.simulate` takes it.
        seconds: that the search may take.
        fixed: entries that are set are fixed for every strategy; the others are searched. A graph file's precision is
            fixed, too.
        start: a strategy to try first, with the fixed entries; or an earlier search, whose best is tried
            first and whose measurements are reused if step and machine are the same.
        memory_limit: bytes of a device that a rank may take, with what the device reserves; by default what it has.
        seed: of the random choices.
        moves: how many strategies are planned at most, in place of seconds.
        every_rank: true if all devices must take part; by default fewer may, where that is faster.
        planners: processes that plan ahead, beside this one; by default one for each further core, 7 at most. They
            change how long a search takes, and with `seconds` how far it gets.
        told: called after each strategy with the search so far: `best`, None until one fits, `bound` and `planned`.

    Raises:
        UserError: an argument is invalid, the topology is unknown, or no strategy fits the memory.
        CaptureError: the step cannot be one graph.
    """
    budget = Budget.of(seconds, moves)
    _check_arguments(fixed, start, seed, every_rank, told, planners)
    machine = with_memory_limit(machine_of(topology), memory_limit)
    stored = as_stored(step, fixed or data_parallel())
    base = stored.in_precision(fixed or Strategy())
    earlier = start.record if isinstance(start, SearchResult) else start
    first = earlier if isinstance(earlier, Strategy | None) else earlier.best
    count = min(cores() - 1, _MOST_PLANNERS) if planners is None else planners
    with passed_over(), Planners(count) as processes:
        processes.begin(len(stored.graph.nodes))
        facts = StepFacts(stored, machine, base)
        lower_bounds = LowerBounds(facts, machine.least_limit)
        learned = Learned()
        if isinstance(earlier, SearchRecord):
            learned = earlier.learned_of(stored, machine, base)
        evaluator = Evaluator(stored, machine, facts.ranks, planners=processes)
        state = SearchState(evaluator, lower_bounds, budget, learned, told)
        _plan_given(state, first, every_rank)
        move = partial(improve, state, seed)
        if is_planned_as_is(base):
            move()
        else:
            state.arrange(space_of(facts, every_rank))
            for until, go_on in _phases(state, move):
                state.until = until
                go_on()
        return state.result()


def _phases(
    state: SearchState, move: Callable[[], None]
) -> Iterator[tuple[float, Callable[[], None]]]:
    """The phases of a search: the part of the seconds at which each ends, and what it tries.

    First promising candidates, and moves, each for a part of the time; then all remaining candidates.
    """
    candidates = Enumeration(state)
    by_hand, others = partial(candidates.plan, True), partial(candidates.plan, False)
    if (
        state.budget.moves < inf
    ):  # all candidates before moves: what so many find depends on no clock
        yield 1.0, candidates.probe_smallest
        yield 1.0, candidates.plan_cheapest
    else:
        yield 0.4, candidates.probe_smallest
        yield 0.4, candidates.probe_kinds
        yield 0.4, candidates.plan_cheapest
        yield 0.4, partial(by_hand, likely=True)
        likely = partial(others, likely=True)
        first, second = (likely, move) if candidates.others_are_better() else (move, likely)
        yield 0.7, first
        yield 0.9, second
        # What was not reached in its part of the time: nothing by hand that should be faster is left out for moves.
        yield 1.0, partial(by_hand, likely=True)
        yield 1.0, move
    for each in (by_hand, others, by_hand):
        yield 1.0, partial(each, likely=False)
    if not state.log.locality:
        yield 1.0, move


def _plan_given(state: SearchState, start: Strategy | None, every_rank: bool) -> None:
    """Plan the start, with all that is fixed, and stages that are fixed with their ranks.

    Raises:
        UserError: these leave out ranks, where all must take part.
    """
    base, evaluator = state.facts.base, state.evaluator
    begin = None if start is None else with_fixed(start, base)
    for name, strategy in (("start", begin), ("fixed", base if is_planned_as_is(base) else None)):
        if strategy is None:
            continue
        try:
            idle = len(evaluator.placement(strategy).ranks) < len(evaluator.ranks)
        except UserError:  # of more ranks than there are: its plan says so
            idle = False
        if every_rank and idle:
            if is_planned_as_is(base):
                raise UserError(
                    f"weft.search: the stages of fixed= leave out some of {len(evaluator.ranks)} ranks, all of which "
                    "must take part; name each rank in the placement of a stage, or leave it out of the machine or "
                    "placement"
                )
            state.leave_out(IDLE)
            continue
        state.log.plan(name, strategy)
        if name == "start" and (why := state.log.forget_refused(strategy)):
            state.leave_out(f"the start is refused: {why}")
        state.tell()


def _check_arguments(
    fixed: object, start: object, seed: object, every_rank: object, told: object, planners: object
) -> None:
    entries = "a weft.Strategy with the entries that hold for all"
    begins = "a weft.Strategy, or the weft.SearchResult or weft.SearchRecord of an earlier search"
    starts = isinstance(start, Strategy | SearchResult | SearchRecord | None)
    check(
        "weft.search",
        (isinstance(fixed, Strategy | None), "fixed", entries, fixed),
        (starts, "start", begins, start),
        (is_whole(seed), "seed", "a whole number, such as 0", seed),
        (isinstance(every_rank, bool), "every_rank", "True or False", every_rank),
        (callable(told), "told", "a function of what is known", told),
        (
            planners is None or is_whole(planners, 0),
            *("planners", "the number of processes beside this one, from 0", planners),
        ),
    )


def with_memory_limit(machine: Machine, asked: int | None) -> Machine:
    """The machine with a memory limit on its ranks, if one is given.

    Raises:
        UserError: when what is asked for is not a number of bytes.
    """
    if asked is None:
        return machine
    if not is_whole(asked, 1) or asked >= 2**62:
        raise wrong("weft.search: memory_limit", "bytes, a whole number from 1 to 2**62", asked)
    return replace(machine, limit=asked)
