"""BesideEvaluation: changes of tasks whose seconds hang on what runs beside them, each evaluated by a full run.

A change of one task moves others along the links and calls that they meet on, so that nothing of what was found before
can be taken over where the state of a plain clock would be the same. The answers are exact; `Evaluation` is quicker
where nothing meets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from weft.errors import InternalError
from weft.hardware.costs import Slowdown
from weft.simulator.delta.evaluation import NEVER, UNDONE, Change, Evaluation
from weft.simulator.timing.clock import Times
from weft.simulator.timing.sharing import LinkSharing
from weft.simulator.timing.slowdown import NOTHING_SHARED, is_beside, run_beside
from weft.simulator.timing.tasks import Tasks, in_ticks
from weft.units import Seconds

Item = TypeVar("Item")


@final
@dataclass(frozen=True)
class _Evaluated:
    """Tasks and their times; None where some never begin."""

    tasks: Tasks
    times: Times | None

    @property
    def makespan(self) -> Seconds:
        return NEVER if self.times is None else self.times.makespan


@final
class BesideEvaluation:
    """Evaluates changes as `Evaluation` does: each is proposed, then accepted or undone.

    A communication that lasts longer by a change needs its links for the same share of its seconds.

    Args:
        tasks: as they are at first.
        slowdown, sharing, uses: as of `run_beside`.

    Raises:
        InternalError: when some of the tasks never begin.
    """

    def __init__(
        self,
        tasks: Tasks,
        slowdown: Mapping[int, Slowdown],
        sharing: LinkSharing = NOTHING_SHARED,
        uses: Sequence[int] = (),
    ) -> None:
        self._beside = slowdown, sharing, uses
        self._now = _Evaluated(tasks, run_beside(tasks, *self._beside))
        self._proposed: _Evaluated | None = None
        self._before: deque[_Evaluated] = deque(maxlen=UNDONE)

    @property
    def seconds(self) -> Seconds:
        """The makespan without what is proposed."""
        return self._now.makespan

    @property
    def times(self) -> Times:
        """The times of all tasks without what is proposed."""
        assert self._now.times is not None
        return self._now.times

    def needs(self, task: int) -> tuple[int, ...]:
        """The tasks that one waits for, with what is proposed."""
        return (self._proposed or self._now).tasks.needs[task]

    def propose(self, change: Change) -> Seconds:
        """The makespan with a change; infinite where some task never begins.

        Raises:
            InternalError: when something else is proposed.
        """
        if self._proposed is not None:
            raise InternalError("a change is proposed already: accept or undo it first")
        self._proposed = self._evaluated(changed(self._now.tasks, change))
        return self._proposed.makespan

    def accept(self) -> None:
        """Let what was proposed be so.

        Raises:
            InternalError: when nothing is proposed, or some task would never begin.
        """
        if self._proposed is None or self._proposed.times is None:
            raise InternalError("there is no change that could be accepted")
        self._before.append(self._now)
        self._now, self._proposed = self._proposed, None

    def undo(self) -> None:
        """Forget what is proposed; if nothing is, what was accepted last, of the last `UNDONE`.

        Raises:
            InternalError: when there is nothing to undo.
        """
        if self._proposed is not None:
            self._proposed = None
            return
        if not self._before:
            raise InternalError("there is no change to undo")
        self._now = self._before.pop()

    def _evaluated(self, tasks: Tasks) -> _Evaluated:
        try:
            return _Evaluated(tasks, run_beside(tasks, *self._beside))
        except InternalError:
            return _Evaluated(tasks, None)


def evaluation_of(
    tasks: Tasks,
    slowdown: Mapping[int, Slowdown],
    sharing: LinkSharing = NOTHING_SHARED,
    uses: Sequence[int] = (),
) -> Evaluation | BesideEvaluation:
    """The quickest evaluation that is exact; arguments as of `run_beside`."""
    if is_beside(slowdown, sharing):
        return BesideEvaluation(tasks, slowdown, sharing, uses)
    return Evaluation(tasks)


def changed(tasks: Tasks, change: Change) -> Tasks:
    """The tasks with a change."""
    seconds = {task: in_ticks(lasts) for task, lasts in change.seconds.items()}
    return replace(
        tasks,
        seconds=_with(tasks.seconds, seconds),
        needs=_with(tasks.needs, change.needs),
        turn=_with(tasks.turn, change.turns),
    )


def _with(old: Sequence[Item], new: Mapping[int, Item]) -> tuple[Item, ...]:
    return tuple(new.get(task, own) for task, own in enumerate(old)) if new else tuple(old)
