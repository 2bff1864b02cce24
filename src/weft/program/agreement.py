"""Agreement of all processes of a world before a program runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast, final

from weft import errors
from weft.errors import RankFailure, UserError
from weft.ir.plan import Communicator
from weft.runtime.channels.channel import Channel
from weft.runtime.failures.failure_store import PeerFailure, first_line
from weft.runtime.world.world import World

T = TypeVar("T")

# How a leaf of the example batch is called among what is asked for.
LEAF = "batch leaf "
_OF_ROWS = (
    '. Where each process has rows of its own, compile with batch="local", or make the batch by weft.from_local, and '
    "give all processes as many"
)
_OF_BATCH = (
    ' shapes and dtypes, with batch="local" as many rows, and with weft.Buckets an example that is padded to the same '
    "length"
)


def run_on_all(world: World, what: str, work: Callable[[], T]) -> T:
    """Give the result of `work` in this process, once it has succeeded in all. Every process must call it.

    Args:
        what: a text for the work, for errors.
        work: needs no other rank.

    Raises:
        UserError: what `work` raises on some rank, of its class, on all of them.
        RankFailure: where `work` raises something else on another rank; or another process is
            elsewhere.
        UserError: in a process that was forked from the one that has the ranks.
    """
    return gather_beside(world, what, lambda: (work(), ""))[0]


def gathered(world: World, what: str, tell: Callable[[], str]) -> list[str]:
    """The texts of all ranks, on every rank, unless one rank refuses. Every process must call it.

    Args:
        what: a text for the texts, for errors.

    Raises:
        UserError, RankFailure: as `run_on_all`.
    """
    return gather_beside(world, what, lambda: (None, tell()))[1]


def gather_beside(
    world: World, what: str, work: Callable[[], tuple[T, str]]
) -> tuple[T, list[str]]:
    """The result of `work` in this process and the texts that it gives on all ranks. Every process must call it.

    Raises:
        UserError, RankFailure: as `run_on_all`.
    """
    world.check_process()
    if not world.several:
        made, text = work()
        return made, [text] * world.size
    text, kind, error, cause = "", "", "", None
    try:
        made, text = work()
    except Exception as found:
        kind, error, cause = type(found).__name__, str(found), found
    what = f"{world.calls.last.text}: {what}"
    own = json.dumps([what, text, kind, error])
    every = [_read(each) for each in world.gather(dict.fromkeys(world.ranks, own))]
    for rank, each in enumerate(every):
        if each[0] != what:
            called, theirs = world.calls.last, each[0].split(":")[0]
            world.calls.begin_again()
            steps = called.text.startswith("step ") and theirs.startswith("step ")
            raise cause or RankFailure(
                "the ranks make different calls; every rank must make the same calls in the same order: rank "
                f"{world.ranks[0]} is in {called}, rank {rank} in {theirs}{_OF_ROWS if steps else ''}"
            )
    if cause is not None and (
        not isinstance(cause, UserError) or all(x[3] == error for x in every)
    ):
        raise cause
    for rank, (_, _, kind, error) in enumerate(every):  # the first that has one
        if kind and (known := getattr(errors, kind, None)) is not None:
            raise known(f"rank {rank}: {error}") from cause
        if kind:
            raise RankFailure(f"rank {rank}: {kind}: {error}") from cause
    return made, [each[1] for each in every]


def check_alike(world: World, what: str, asked: Callable[[], Mapping[str, Any]]) -> None:
    """Raise UserError when ranks ask for different programs, told by name as plain data. Every process must call it."""
    for rank, first, other in differences(gathered(world, what, lambda: json.dumps(asked()))):
        for name in {**first, **other}:
            one, two = (each.get(name, "not given") for each in (first, other))
            if one != two:
                raise UserError(
                    f"the ranks compile different programs: {name} is {one} on rank 0, and {two} on rank {rank}; every "
                    f"process must give the same{_OF_BATCH if name.startswith(LEAF) else ''}"
                )


def differences(texts: Sequence[str]) -> Iterator[tuple[int, Any, Any]]:
    """Each rank whose JSON differs from rank 0's, with both values."""
    first, *others = map(json.loads, texts)
    return ((rank, first, other) for rank, other in enumerate(others, 1) if other != first)


def _read(text: str) -> list[str]:
    """The texts that `gather_beside` sends; of another exchange, none."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    read = isinstance(found, list) and [type(each) for each in found] == [str] * 4
    return found if read else ["another call", "", "", ""]


@contextmanager
def everyone(world: World) -> Iterator[Channel | None]:
    """A channel between all processes of the world, each of one rank; None when this process is the only one."""
    world.check_process()
    if not world.several:
        yield None
        return
    group = Communicator(0, tuple(range(world.size)))
    channel = world.connect((group,))[world.ranks[0]][group.id]
    try:
        yield channel
    finally:
        channel.close()


@final
class TrialFailure(RankFailure):
    """A strategy that failed while it was tried; all ranks know it, and continue."""


def unless_failed(world: World, what: str, work: Callable[[], T]) -> T:
    """Give the result of `work` in this process, once it has succeeded in all. Every process must call it.

    Only the text of an error is kept: its frames may hold the memory that was lacking.

    Args:
        what: a text for the work, for errors.
        work: of this process; may be exchanges of all ranks.

    Raises:
        TrialFailure: on all ranks, which have forgotten the failure, when it failed on one.
        RankFailure: a rank died, or did not answer.
    """
    own: list[RankFailure] = []

    def tried() -> tuple[T | None, str]:
        try:
            return work(), ""
        except Exception as error:
            if isinstance(error, RankFailure):
                own.append(error.with_traceback(None))
            return None, json.dumps([isinstance(error, PeerFailure), first_line(error)])

    try:
        made, texts = gather_beside(world, what, tried)
    except RankFailure:
        if own:  # another rank is gone: what was raised first says more
            raise own[0]  # noqa: B904
        raise
    failed = [(rank, *json.loads(text)) for rank, text in enumerate(texts) if text]
    if not failed:
        return cast(T, made)
    world.reset_after_failure()
    # A rank that only stopped because of another one says less.
    rank, _, said = min(failed, key=lambda each: bool(each[1]))
    raise TrialFailure(f"rank {rank}: {said}" if world.several else said)
