"""The table of what was planned: what came of each strategy, and which term loses; and why nothing fits."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, final

from weft.search.evaluation.measures import Answer, Measures, Refused
from weft.search.outcome.result import Outcome, Tried
from weft.search.outcome.why_not import loses_by, too_much
from weft.strategy.strategy import Strategy
from weft.units import bytes_text


@final
class PlannedStrategy(NamedTuple):
    """A strategy that a search planned.

    Attributes:
        name: of it, in words.
        strategy: as it was planned.
        answer: its measures, or why it was refused.
        by_hand: true where people write such strategies without a search.
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
    """Dimensions that the space has not, in words.

    Args:
        statistics: true where the step takes statistics over samples.
    """
    return (*_NOT_SEARCHED, _OF_EACH) if statistics else _NOT_SEARCHED


def rows(
    planned: Collection[PlannedStrategy], best_text: str, limit: int | None
) -> tuple[Tried, ...]:
    """The rows of strategies that were planned, the quickest that fit first.

    Args:
        planned: all.
        best_text: the best of them, as text.
        limit: bytes of memory.
    """
    (best,) = (each.answer for each in planned if str(each.strategy) == best_text)
    assert isinstance(best, Measures)
    return tuple(sorted((_row(each, best_text, best, limit) for each in planned), key=_place))


def _row(each: PlannedStrategy, best_text: str, best: Measures, limit: int | None) -> Tried:
    name, strategy, found, by_hand = each
    if isinstance(found, Refused):
        return Tried(name, strategy, "refused", None, None, found.why, by_hand)
    outcome: Outcome = "slower" if limit is None or found.memory <= limit else "does not fit"
    outcome = "best" if str(strategy) == best_text else outcome
    why = _why(outcome, found, best, limit or 0)
    return Tried(name, strategy, outcome, found.seconds, found.memory, why, by_hand)


def _why(outcome: Outcome, found: Measures, best: Measures, limit: int) -> str:
    """The term that loses most against the best."""
    if outcome == "best":
        return ""
    return too_much(found.memory, limit) if outcome == "does not fit" else loses_by(found, best)


def _place(tried: Tried) -> tuple[int, float, str]:
    order = {"best": 0, "slower": 1, "does not fit": 2, "refused": 3}
    return order[tried.outcome], tried.seconds or 0.0, tried.name


def nothing_fits(planned: Collection[PlannedStrategy], most: int | None, left: int) -> str:
    """The message where no strategy that was planned has room.

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
    refused = [each.answer.why for each in planned if isinstance(each.answer, Refused)]
    if refused:
        rest = f"; give{time.removeprefix(',')}" if left else ""
        return f"weft.search: no strategy that was tried can be planned; the first is refused so: {refused[0]}{rest}"
    return (
        f"weft.search: no strategy fits {limit} of memory: parameters and states alone take more, sharded over "
        "all devices, with what these reserve; give a larger limit or more devices"
    )


def _bytes(count: int) -> str:
    return f"{count} bytes ({bytes_text(count)})"
