"""The table of what a search planned, and its result: the best strategy, a bound for all others, and why not each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

from weft.search.additive import AdditivePart
from weft.search.measures import Answer, Measures, Unplannable
from weft.search.record import SearchRecord
from weft.search.why_not import Probed, WhyNot, loses_by, too_much
from weft.simulator.simulation import Simulation
from weft.strategy.strategy import Strategy, stage_count
from weft.units import Bytes, Seconds, bytes_text

Outcome: TypeAlias = Literal["best", "slower", "does not fit", "refused"]
# Rows of the table of what was tried, as text.
_ROWS = 24


@final
@dataclass(frozen=True)
class Tried:
    """A strategy that was planned and simulated.

    Attributes:
        name: a readable name of the strategy.
        strategy: as it was planned.
        outcome: the outcome.
        seconds: of a step; None if it was refused.
        memory: bytes on the rank with the least room, with what its device reserves; None if it was refused.
        why: the cost that makes it slower, or why it was refused.
        by_hand: true if it is a usual handwritten strategy.
    """

    name: str
    strategy: Strategy
    outcome: Outcome
    seconds: Seconds | None
    memory: Bytes | None
    why: str = ""
    by_hand: bool = False

    def __str__(self) -> str:
        took = "" if self.seconds is None else f"{1e3 * self.seconds:.3f} ms"
        held = "" if self.memory is None else f"{self.memory / 1e9:.2f} GB"
        hand = "*" if self.by_hand else " "
        return (
            f"{hand} {self.name:<44} {took:>14} {held:>11}  {self.outcome:<12}  {self.why}".rstrip()
        )


@final
@dataclass(frozen=True)
class SearchResult:
    """The best strategy, and everything that was tried.

    Attributes:
        best: the strategy; `grid` says on how many ranks along each axis.
        simulation: of it, as `weft.simulate` gives it.
        bound: lower bound on the seconds of every strategy of the space; 0 if unknown.
        tried: the strategies that were planned, the fastest that fit first.
        skipped: numbers of strategies that were not planned, by reason; and of moves that were refused, by the most
            frequent reasons.
        not_searched: texts for the dimensions that the space lacks.
        locality: which moves from the best were tried and are not faster, in words.
        why: for each usual handwritten kind, the best known strategy and why it is slower.
        additive: the sum of calls and boxing of the best, and the least sum for any layouts in its grid and stages;
            None if unknown, or if time ran out.
        course: everything that was tried, in order.
        record: the measurements of the search, for the next search; with `save`.
    """

    best: Strategy
    simulation: Simulation
    bound: Seconds
    tried: tuple[Tried, ...]
    skipped: Mapping[str, int]
    not_searched: Sequence[str] = ()
    locality: str = ""
    why: tuple[WhyNot, ...] = ()
    additive: AdditivePart | None = None
    course: tuple[Probed, ...] = field(default=(), repr=False, compare=False)
    record: SearchRecord = field(kw_only=True, repr=False, compare=False)

    @property
    def seconds(self) -> Seconds:
        """Seconds of a step with the best strategy."""
        return self.simulation.step_seconds

    @property
    def gap(self) -> float:
        """The part of the best by which a strategy of the space can be faster at most."""
        return 1 - self.bound / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """The table of what was tried, and what was not."""
        best = next(each for each in self.tried if each.outcome == "best")
        lines = [
            f"best: {best.name}: {1e3 * self.seconds:.3f} ms a step",
            f"bound: no strategy of the space takes less than {1e3 * self.bound:.3f} ms, {self.gap:.1%} below the best"
            if self.bound
            else "bound: none is known where stages are fixed with their ranks",
            *([f"layouts: {self.additive}"] if self.additive is not None else []),
            "",
            *map(str, self.tried[:_ROWS]),
        ]
        if len(self.tried) > _ROWS:
            lines.append(f"  and {len(self.tried) - _ROWS} more")
        lines.append("  (*: strategies that people write by hand)")
        lines += ["", "why not:", *(f"  {each}" for each in self.why), ""] if self.why else []
        lines += [f"moves: {self.locality}"] if self.locality else []
        lines += [f"not planned: {count}, {why}" for why, count in self.skipped.items() if count]
        lines += [f"not searched: {each}" for each in self.not_searched]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The result as dicts, lists, numbers and strings; in seconds and bytes.

        Left out are the strategies themselves, the best among them, the course and the record; of the additive part
        there is its gap.
        """
        return {
            "simulation": self.simulation.to_json(),
            "bound": self.bound,
            "gap": self.gap,
            "additive_gap": None if self.additive is None else self.additive.gap,
            "tried": [
                {
                    one.name: getattr(each, one.name)
                    for one in fields(each)
                    if one.name != "strategy"
                }
                for each in self.tried
            ],
            "skipped": dict(self.skipped),
            "not_searched": list(self.not_searched),
            "locality": self.locality,
            "why": [asdict(each) for each in self.why],
        }


@final
class PlannedStrategy(NamedTuple):
    """A strategy that a search planned.

    Attributes:
        name: a readable name.
        strategy: as it was planned.
        answer: its measures, or why it was refused.
        by_hand: true if it is a usual handwritten strategy.
    """

    name: str
    strategy: Strategy
    answer: Answer
    by_hand: bool


_NOT_SEARCHED = (
    "precision, clipping, capacities of experts: as `fixed` says them",
    "copies of single registers: as planning gives them",
)
_OF_EACH = (
    "micro-batches: the step has a BatchNorm, which would take statistics of each, as `fixed` says"
)


def not_searched(statistics: bool) -> tuple[str, ...]:
    """Texts for the dimensions that the space lacks.

    Args:
        statistics: true if the step takes statistics over samples.
    """
    return (*_NOT_SEARCHED, _OF_EACH) if statistics else _NOT_SEARCHED


def rows(planned: Mapping[str, PlannedStrategy], best: str, limit: int | None) -> tuple[Tried, ...]:
    """The rows of strategies that were planned, the fastest that fit first.

    Args:
        planned: all, by key.
        best: the key of the best.
        limit: bytes of memory.
    """
    quickest = planned[best].answer
    assert isinstance(quickest, Measures)

    def row(key: str, name: str, strategy: Strategy, found: Answer, by_hand: bool) -> Tried:
        if isinstance(found, Unplannable):
            return Tried(name, strategy, "refused", None, None, found.why, by_hand)
        over, outcome = too_much(found.memory, limit), "does not fit"
        if not over:
            outcome = "best" if key == best else "slower"
        why = over or ("" if key == best else loses_by(found, quickest))
        return Tried(name, strategy, outcome, found.seconds, found.memory, why, by_hand)  # type: ignore[arg-type]

    order = get_args(Outcome)
    return tuple(
        sorted(
            (row(key, *each) for key, each in planned.items()),
            key=lambda each: (order.index(each.outcome), each.seconds or 0.0, each.name),
        )
    )


def nothing_fits(planned: Collection[PlannedStrategy], most: int | None, left: int) -> str:
    """The message if no planned strategy fits.

    Args:
        planned: all that were.
        most: bytes of memory.
        left: how many others were not reached.
    """
    held = [
        (each.answer.memory, each.name) for each in planned if isinstance(each.answer, Measures)
    ]
    limit = _bytes(most or 0)
    time = f", more time or moves for the {left} that were not reached" if left else ""
    if held:
        memory, name = min(held)
        return (
            f"weft.search: no strategy fits {limit} of memory; the least that was found is {_bytes(memory)} "
            f"({name}): give a larger limit, more devices, or a smaller batch{time}"
        )
    refused = [each.answer.why for each in planned if isinstance(each.answer, Unplannable)]
    if refused:
        rest = f"; give{time.removeprefix(',')}" if left else ""
        return f"weft.search: no strategy that was tried can be planned; the first is refused so: {refused[0]}{rest}"
    return (
        f"weft.search: no strategy fits {limit} of memory: parameters and states alone take more, sharded over "
        "all devices, with what these reserve; give a larger limit or more devices"
    )


def _bytes(count: int) -> str:
    return f"{count} bytes ({bytes_text(count)})"


# What decides which costs a step's time depends on: its stages, micro-batches, their order, and the axes of its grid.
_Outline: TypeAlias = tuple[int, int, str | None, int]
# Of those that split other parameters, the ones run that should take so many times as long as the fastest at most:
# steps of some works took up to a fifth less, or more, than was simulated.
_NEAR = 1.25
# Entries that a step without stages can do without.
_ADDED = ("micro_batches", "schedule", "in_flight", "zero", "recompute", "offload")


def worth_running(
    tried: Sequence[Tried],
    count: int,
    fixed: Strategy | None = None,
    fits: Callable[[Strategy], bool] = lambda _: True,
    split: Callable[[Strategy], Hashable] = lambda _: None,
) -> list[Strategy]:
    """Some strategies that fit, the fastest first.

    A search ends among strategies similar to its best: an error of the simulation affects all
    of them. Half of those returned are the fastest; the other half is the fastest that people write by hand, then
    the fastest without what is added to its layouts, then the fastest that splits other parameters, where it should
    not be far slower, then the fastest of each other number of stages and micro-batches, as far as there are such.

    One strategy is returned for all whose plans are equal.

    Args:
        tried: strategies that were planned, the fastest that fit first, as a result of a search has them.
        count: how many are returned at most, from 1.
        fixed: entries that hold for every strategy.
        fits: true if a strategy that was not tried can be planned and has room; it comes after the others.
        split: a function from a strategy to the parameters that it splits.
    """
    fit = _unlike(
        [each for each in tried if each.outcome in ("best", "slower")],
        (),
        # For an outline those that take the same time and memory to the last digit have equal plans.
        lambda each: (each.seconds, each.memory, _outline(each.strategy)[:3]),
    )
    bare = _bare(fit, fixed or Strategy()) if count > 2 else None
    # Patterns count in their order, which equal mappings need not have.
    known = next((each for each in tried if str(each.strategy) == str(bare)), None)
    added = [bare] if bare is not None and known is None and fits(bare) else []
    first = [each for each in fit if each.by_hand][:1] + [each for each in fit if each is known]
    half = fit[: max(1, count // 2)]
    near = [each for each in fit if (each.seconds or inf) <= _NEAR * (fit[0].seconds or inf)]
    others = _unlike(near, [*half, *first], lambda each: split(each.strategy))
    outlines = _unlike(fit, [*half, *first, *others], lambda each: _outline(each.strategy))
    taken = list[Tried]()
    for each in (*half, *first, *others, *outlines, *fit):
        if len(taken) < count - len(added) and each not in taken:
            taken.append(each)
    return [each.strategy for each in fit if each in taken] + added


def _bare(fit: Sequence[Tried], fixed: Strategy) -> Strategy | None:
    """The layouts of the fastest without stages, and no more than them and what is fixed; None if it is so already.

    Simulations are least sure of overheads: of parts of a step, of gathers, of recompute.
    """
    flat = next((each.strategy for each in fit if stage_count(each.strategy) == 1), None)
    if flat is None:
        return None
    found = replace(flat, **{name: getattr(fixed, name) for name in _ADDED})
    return found if found != flat else None


def _unlike(
    fit: Iterable[Tried], taken: Iterable[Tried], trait: Callable[[Tried], Hashable]
) -> list[Tried]:
    known, found = set(map(trait, taken)), list[Tried]()
    for each in fit:
        if (own := trait(each)) not in known:
            known.add(own)
            found.append(each)
    return found


def _outline(strategy: Strategy) -> _Outline:
    axes = sum(size > 1 for size in strategy.grid)
    return stage_count(strategy), strategy.micro_batches, strategy.schedule, axes
