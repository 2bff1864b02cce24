"""Communications that run at the same time share the links that they need: which links, and the speed of each
communication.

A communication that runs alone needs each of its links for a share of its seconds. While several need more of a link
than there is, they are slower: their speeds rise together, each in proportion to what it needs, until a link is full or
one runs as if it were alone. This is max-min fairness by the link of which each needs most (Bertsekas and Gallager,
"Data Networks", section 6.5; Ghodsi et al., "Dominant Resource Fairness", NSDI 2011).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.cached import cached_property
from weft.hardware.costs import LinkUse
from weft.ir.plan import Communicate, RankPlan
from weft.simulator.acts import ActCosts
from weft.simulator.tasks import Tasks, to_ticks
from weft.units import Seconds

# For each link that may be too little, by number, the share of a communication's seconds in which it is needed whole.
Needs: TypeAlias = Mapping[int, float]
# Links are not too little for what is more than all of them by rounding.
_ROUNDING = 1e-9


@final
@dataclass(frozen=True)
class LinkSharing:
    """Needs of links of some communications, by number.

    Attributes:
        needs: of each, of links that may be too little; nothing of those that never share any.
        most: of each, the share of its seconds in which it needs that link whole of which it needs most.
    """

    needs: Sequence[Needs] = ()
    most: Sequence[float] = ()
    _known: dict[tuple[int, ...], Mapping[int, float]] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(uses: Sequence[tuple[LinkUse, Seconds, str]]) -> LinkSharing:
        """The needs of communications.

        Args:
            uses: of each, its links, the seconds that it takes alone, and a queue that runs one of them at a time.
        """
        busy = [use.busy() for use, _, _ in uses]
        size = 1 + max((int(one.max()) for one, _ in busy if len(one)), default=-1)
        queues: dict[str, npt.NDArray[np.float64]] = {}
        for (_, seconds, queue), (resources, needed) in zip(uses, busy, strict=True):
            most = queues.setdefault(queue, np.zeros(size))
            most[resources] = np.maximum(most[resources], needed / seconds)
        scarce = np.add.reduce([np.zeros(size), *queues.values()]) > 1.0 + _ROUNDING
        shares = [
            (resources[scarce[resources]], (needed / seconds)[scarce[resources]])
            for (_, seconds, _), (resources, needed) in zip(uses, busy, strict=True)
        ]
        largest = [
            float((needed / seconds).max(initial=0.0))
            for (_, seconds, _), (_, needed) in zip(uses, busy, strict=True)
        ]
        first = _first_alike(size, shares)
        needs = [
            dict(zip(first[resources].tolist(), own.tolist(), strict=True))
            for resources, own in shares
        ]
        return LinkSharing(needs, largest)

    @property
    def any(self) -> bool:
        """True if some of them may share a link."""
        return any(self.needs)

    @cached_property
    def near(self) -> Sequence[frozenset[int]]:
        """For each communication, the communications that need one of its links, itself included."""
        on: dict[int, set[int]] = {}
        for number, needs in enumerate(self.needs):
            for link in needs:
                on.setdefault(link, set()).add(number)
        return [frozenset().union(*(on[link] for link in needs)) for needs in self.needs]

    def around(self, some: set[int], running: Mapping[int, object]) -> tuple[int, ...]:
        """The running communications whose speeds depend on the given ones, in order."""
        found, left = set(some), list(some)
        while left:
            for other in self.near[left.pop()]:
                if other not in found and other in running:
                    found.add(other)
                    left.append(other)
        return tuple(sorted(found.intersection(running)))

    def speeds(self, running: tuple[int, ...]) -> Mapping[int, float]:
        """The speed of each of some communications that run at the same time, as a share of its speed alone."""
        found = self._known.get(running)
        if found is None:
            found = self._known[running] = _filled(
                {one: self.needs[one] for one in running}, self.most
            )
        return found


def _filled(needs: Mapping[int, Needs], most: Sequence[float]) -> Mapping[int, float]:
    """Speeds that rise together until a link is full, or one is as fast as alone; the others continue."""
    on: dict[int, list[int]] = {}
    for number, own in needs.items():
        for link in own:
            on.setdefault(link, []).append(number)
    speeds: dict[int, float] = {}
    while len(speeds) < len(needs):
        levels = {link: _level(link, own, needs, most, speeds) for link, own in on.items()}
        level = min([*levels.values(), *(most[one] for one in needs if one not in speeds)])
        stopped = {one for one in needs if one not in speeds and most[one] <= level}
        stopped.update(one for link, own in on.items() if levels[link] <= level for one in own)
        for one in stopped - set(speeds):
            speeds[one] = min(1.0, level / most[one])
    return speeds


def _level(
    link: int,
    own: Sequence[int],
    needs: Mapping[int, Needs],
    most: Sequence[float],
    speeds: Mapping[int, float],
) -> float:
    """The level to which the speeds that still rise may do so until a link is full; sums do not depend on an order."""
    taken = fsum(speeds[one] * needs[one][link] for one in own if one in speeds)
    rising = fsum(needs[one][link] / most[one] for one in own if one not in speeds)
    return max(1.0 - taken, 0.0) / rising if rising else float("inf")


def _first_alike(
    size: int, shares: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]
) -> npt.NDArray[np.int64]:
    """For each link, the first that all communications need as much as this one: of thousands few are left."""
    marks = np.zeros(size, dtype=np.uint64)
    for resources, own in shares:
        every = np.zeros(size)
        every[resources] = own
        # Each step can be undone, so that links differ as soon as one of their needs does.
        marks = (marks << np.uint64(23)) | (marks >> np.uint64(41))
        marks = (marks ^ every.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    _, first, place = np.unique(marks, return_index=True, return_inverse=True)
    found: npt.NDArray[np.int64] = first[place.reshape(-1)]
    return found


@final
class SharedLinks:
    """The needs of links of the communications of plans.

    Args:
        plans: of the representative ranks.
        acts: costs of their acts.

    Attributes:
        sharing: the needs, by number; communications of one family have one number for the same exchange.
    """

    def __init__(self, plans: Sequence[RankPlan], acts: ActCosts) -> None:
        self._of: dict[tuple[int, int], int] = {}
        numbers: dict[LinkUse, int] = {}
        uses: list[tuple[LinkUse, Seconds, str]] = []
        for plan in plans:
            lasts = acts.seconds(plan.rank)
            for actor in plan.actors:
                parts = acts.parts[plan.rank][actor.id]
                links = parts[0].cost.links if parts and isinstance(actor, Communicate) else None
                seconds = to_ticks(lasts[actor.id])
                if links is None or not seconds:
                    continue
                number = numbers.setdefault(links, len(numbers))
                self._of[plan.rank, actor.id] = number
                if number == len(uses):
                    uses.append((links, seconds, actor.queue))
        self.sharing = LinkSharing.of(uses)

    def uses(self, tasks: Tasks) -> Sequence[int]:
        """For each task, the number of what it needs; -1 where nothing is known."""
        return [self._of.get(members[0][:2], -1) if members else -1 for members in tasks.members]
