"""Work on all ranks that may fail on some of them without an end of the job: all know it, and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar, final

from weft.errors import RankFailure
from weft.program.everyone import told
from weft.runtime.failures.board import PeerFailure, first_line
from weft.runtime.world.world import World

T = TypeVar("T")


@final
class TrialFailure(RankFailure):
    """A strategy that failed while it was tried; all ranks know it, and go on."""


def unless_failed(world: World, what: str, work: Callable[[], T]) -> T:
    """Give the result of `work` in this process, once it has succeeded in all. Every process must call it.

    Of an error only the text is kept: what its frames hold may be the memory that was lacking.

    Args:
        world: of all ranks.
        what: it is that they do.
        work: of this process; may be exchanges of all ranks.

    Raises:
        TrialFailure: on all ranks, which have forgotten the failure, when it failed on one.
        RankFailure: a rank died, or did not answer.
    """
    made: list[T] = []
    own: list[RankFailure] = []

    def tell() -> str:
        try:
            made.append(work())
        except Exception as error:
            if isinstance(error, RankFailure):
                own.append(error.with_traceback(None))
            return json.dumps([isinstance(error, PeerFailure), first_line(error)])
        return ""

    try:
        texts = told(world, what, tell)
    except RankFailure:
        if own:  # another rank is gone: what was raised first says more
            raise own[0]  # noqa: B904
        raise
    failed = [(rank, *json.loads(text)) for rank, text in enumerate(texts) if text]
    if not failed:
        return made[0]
    world.renew()
    # A rank that only stopped because of another one says less.
    rank, _, said = min(failed, key=lambda each: bool(each[1]))
    raise TrialFailure(said if world.size == len(world.ranks) else f"rank {rank}: {said}")
