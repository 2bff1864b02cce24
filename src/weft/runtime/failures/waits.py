"""Circles of waits: ranks that wait in different groups, each for one that will not come."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import final

# A rank that has waited so many seconds tells the others, and looks at them as often.
PATIENCE = 1.0


@final
@dataclass(frozen=True)
class Wait:
    """The call that a rank waits in.

    Attributes:
        ranks: the group that must come together, in its order.
        count: which collective of that group it is, from 1.
        begun: for every group, how many collectives this rank has begun in it.
        what: what asks for it, and where.
    """

    ranks: tuple[int, ...]
    count: int
    begun: tuple[tuple[tuple[int, ...], int], ...]
    what: str

    def came_to(self, other: Wait) -> bool:
        """True where the rank that waits here has come to another rank's collective before."""
        return dict(self.begun).get(other.ranks, 0) >= other.count

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Wait:
        """Read what `str` wrote."""
        found = json.loads(text)
        begun = tuple((tuple(ranks), count) for ranks, count in found["begun"])
        return Wait(tuple(found["ranks"]), found["count"], begun, found["what"])


def circle(rank: int, own: Wait, posted: Callable[[int], Wait | None]) -> dict[int, Wait]:
    """Ranks that wait for one another, this one first; empty where it may still go on.

    A rank that waits for nobody, because it is slow, ends the search: it will come. What others
    posted may be old, but a circle that ends at this rank, which does wait, cannot be: no rank of
    it can have gone on without the next one, which has not come.

    Args:
        own: what it waits in.
        posted: what another rank waits in, as far as it has said.
    """
    waits = {rank: own}
    path = [rank]
    return _closed(path, waits, posted, {rank})


def _closed(
    path: list[int],
    waits: dict[int, Wait],
    posted: Callable[[int], Wait | None],
    seen: set[int],
) -> dict[int, Wait]:
    here = waits[path[-1]]
    if path[0] in here.ranks and len(path) > 1 and not waits[path[0]].came_to(here):
        return {rank: waits[rank] for rank in path}
    for peer in here.ranks:
        wait = None if peer in seen else posted(peer)
        seen.add(peer)
        if wait is None or wait.came_to(here):
            continue
        waits[peer] = wait
        found = _closed([*path, peer], waits, posted, seen)
        if found:
            return found
    return {}
