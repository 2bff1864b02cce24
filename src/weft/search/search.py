"""`weft.search`: the fastest strategy of a step on a machine, under a limit of memory, with a bound for all others.

Strategies are points of a space (`weft.search.space`). Floors say what each takes at least, estimates in which order
they are worth a look; each that could still be the best is planned and simulated as `weft.simulate` does it. A floor
at or above the best is a proof that a point need not be planned. Moves from the best reach what is no point
(`weft.search.moves`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from weft.errors import UserError, check, is_whole, wrong
from weft.hardware.here import cores
from weft.hardware.topology import Topology
from weft.planning.machine import HERE, Machine, machine_of
from weft.planning.progress import passed_over
from weft.planning.simulated import Capturable, as_stored
from weft.planning.stored_step import StoredStep
from weft.search.bounds.floors import Floors
from weft.search.budget import Budget
from weft.search.enumeration.beginnings import Beginnings
from weft.search.enumeration.enumeration import Enumeration
from weft.search.enumeration.room import Fronts, Room
from weft.search.evaluation.evaluator import Evaluator
from weft.search.evaluation.planners import Planners
from weft.search.moves.local_search import improve
from weft.search.outcome.result import SearchResult
from weft.search.record.record import Learned, SearchRecord
from weft.search.space.fixed import hand_only, space_of, with_fixed
from weft.search.state import SearchState, Told
from weft.search.steps.facts import StepFacts
from weft.strategy.strategy import Strategy, data_parallel
from weft.tracebacks import shortened

# Parts of the seconds at which strategies that people write by hand end, and what comes first and second of other
# points and moves.
_BY_HAND, _FIRST, _SECOND = 0.4, 0.7, 0.9
# Each keeps the step and what its last plans can use again.
_MOST_PLANNERS = 7
IDLE = "the start: fewer ranks take part than must"


@shortened
def search(
    step: StoredStep | Capturable | str | Path,
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

    Equal arguments with `moves` give equal results on any machine; with `seconds`, as far as it gets.

    Args:
        step: the path of a graph file; or a `weft.Job`, `weft.Step` or `weft.Program`.
        topology: the machine, as `weft.simulate` takes it.
        seconds: that the search may take.
        fixed: entries that are set hold for every strategy; the others are searched. Of a graph file its precision
            holds, too.
        start: a strategy that is tried first, with all that is fixed; or an earlier search, of which the best is. What
            that one measured counts where step and machine are the same, so that less is planned.
        memory_limit: bytes of a device that a rank may take, with what the device reserves; by default what it has.
        seed: of what is drawn.
        moves: how many strategies are planned at most, in place of seconds.
        every_rank: true where all devices must take part; by default fewer may, where that is quicker.
        planners: processes that plan ahead, beside this one; by default one for each further core, 7 at most. They
            change how long a search takes, and with `seconds` how far it gets.
        told: is given the search so far, after each strategy: `best`, None until one fits, `bound` and `planned`.

    Raises:
        UserError: an argument is no such, the topology is unknown, or no strategy fits the memory.
        CaptureError: the step cannot be one graph.
    """
    budget = Budget.of(seconds, moves)
    _check_arguments(fixed, start, seed, every_rank, told)
    machine = limited(machine_of(topology), memory_limit)
    stored = as_stored(step, fixed or data_parallel())
    base = stored.in_precision(fixed or Strategy())
    first, earlier = _begin(start)
    with passed_over(), Planners(_count(planners)) as processes:
        processes.begin(len(stored.graph.nodes))
        facts = StepFacts(stored, machine, base)
        floors = Floors(facts, machine.least_limit)
        learned = Learned() if earlier is None else earlier.learned_of(stored, machine, base)
        evaluator = Evaluator(stored, machine, facts.ranks, planners=processes)
        state = SearchState(evaluator, floors, budget, learned, told)
        _plan_given(state, first, every_rank)
        _plan_all(state, every_rank, partial(improve, state, seed))
        return state.result()


def _plan_given(state: SearchState, start: Strategy | None, every_rank: bool) -> None:
    """Plan the start, with all that is fixed, and stages that are fixed with their ranks.

    Raises:
        UserError: these leave out ranks, where all must take part.
    """
    base, evaluator = state.facts.base, state.evaluator
    begin = None if start is None else with_fixed(start, base)
    for name, strategy in (("start", begin), ("fixed", base if hand_only(base) else None)):
        if strategy is None:
            continue
        if every_rank and _has_idle_ranks(evaluator, strategy):
            if hand_only(base):
                raise UserError(
                    f"weft.search: the stages of fixed= leave out some of {len(evaluator.ranks)} ranks, all of which "
                    "must take part; name each rank in the placement of a stage, or leave it out of the machine or "
                    "placement"
                )
            state.leave_out(IDLE)
            continue
        state.plan(name, strategy)
        if name == "start":
            state.forget_refused(strategy)
        state.tell()


def _has_idle_ranks(evaluator: Evaluator, strategy: Strategy) -> bool:
    """True where a strategy leaves out devices of the machine."""
    try:
        used = evaluator.placement(strategy).ranks
    except UserError:  # of more ranks than there are: its plan says so
        return False
    return len(used) < len(evaluator.ranks)


def _count(planners: object) -> int:
    """The number of processes beside this one."""
    if planners is None:
        return min(cores() - 1, _MOST_PLANNERS)
    if not is_whole(planners, 0):
        raise wrong(
            "weft.search: planners", "the number of processes beside this one, from 0", planners
        )
    return planners


def _begin(
    start: Strategy | SearchResult | SearchRecord | None,
) -> tuple[Strategy | None, SearchRecord | None]:
    """The strategy that is tried first, and the record of an earlier search."""
    if isinstance(start, SearchResult):
        return start.best, start.record
    return (start.best, start) if isinstance(start, SearchRecord) else (start, None)


def _check_arguments(
    fixed: object, start: object, seed: object, every_rank: object, told: object
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
    )


def _plan_all(state: SearchState, every_rank: bool, move: Callable[[], None]) -> None:
    """Plan the points, those first that should be quick, and move from the best between them."""
    enumeration = Enumeration(state)
    if not hand_only(state.facts.base):
        Fronts(state).arrange(space_of(state.facts, every_rank))
        _plan_likely(state, enumeration, move)
    move()
    # Those by hand may leave the first plan to others.
    for by_hand in (True, False, True):
        enumeration.plan_points(by_hand, likely=False)
    if not state.locality:
        move()


def _plan_likely(state: SearchState, enumeration: Enumeration, move: Callable[[], None]) -> None:
    """Plan the points that should be quick, and move from the best, each for a part of the time.

    A search of so many moves plans all points before it moves: what it finds hangs on no clock.
    """
    beginnings = Beginnings(state)
    if state.budget.moves < inf:
        beginnings.look_at_smallest()
        beginnings.plan_cheapest()
        for by_hand in (True, False):
            enumeration.plan_points(by_hand, likely=False)
        return
    state.until = _BY_HAND
    beginnings.look_at_kinds()
    beginnings.plan_cheapest()
    enumeration.plan_points(True, likely=True)
    # Others come first where those by hand lack room, or are slower, as small steps say it; else moves.
    others = partial(enumeration.plan_points, False, likely=True)
    room = Room(state)
    others_first = room.others_are_better()
    state.until = _FIRST
    (others if others_first else move)()
    state.until = _SECOND
    if others_first and room.others_are_far_quicker():
        others()
    (move if others_first else others)()
    state.until = 1.0
    # What was not reached in its part of the time: nothing by hand that should be quicker is left out for moves.
    enumeration.plan_points(True, likely=True)


def limited(machine: Machine, asked: int | None) -> Machine:
    """The machine whose ranks take so many bytes at most, where that is asked for.

    Raises:
        UserError: when what is asked for is no number of bytes.
    """
    if asked is None:
        return machine
    if not is_whole(asked, 1) or asked >= 2**62:
        raise wrong("weft.search: memory_limit", "bytes, a whole number from 1 to 2**62", asked)
    return replace(machine, limit=asked)
