"""The calls that all ranks must make alike (`compile`, `step`, …), and how ranks detect a different sequence of calls.

Every process keeps the sequence of its calls as a chain of checksums. A rank that waits long posts the
end of its chain, and compares it with what others posted: where the chains part, two ranks make
different calls, and neither will come to the other.

Collectives of eager code are not in the chain. Beside it each
rank posts how many it began with which ranks, and in which collective it waits.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import final

from weft.errors import RankFailure
from weft.files import user_line
from weft.runtime.failures.failure_store import FailureStore

# So many calls back a divergence is found.
_KEPT = 32
_UNEVEN = (
    "where a rank has fewer batches than others, or smaller ones, give all as many, as a weft.Loader of the program or "
    "drop_last=True does"
)


@final
@dataclass(frozen=True)
class PostedCall:
    """A call: how many were made by then, the checksum of all of them, which it is, and the user's line."""

    count: int
    chain: int
    text: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.text} ({self.file}:{self.line})" if self.file else self.text


@final
@dataclass(frozen=True)
class EagerWait:
    """A collective of eager code that a rank waits in.

    Attributes:
        count: which collective of that group it is, from 1.
        call: it as a call, with what asks for it, and where; its `count` is 0 in another thread than that of the calls,
            where it comes neither before nor after any of them.
    """

    ranks: tuple[int, ...]
    count: int
    call: PostedCall


@final
@dataclass(frozen=True)
class PostedCalls:
    """The calls of a rank, as it posts them.

    Attributes:
        begun: for every group, how many collectives of eager code this rank has begun in it.
    """

    calls: tuple[PostedCall, ...]
    begun: tuple[tuple[tuple[int, ...], int], ...] = ()
    waits: EagerWait | None = None

    @property
    def last(self) -> PostedCall:
        """The call that the rank was last in."""
        ordered = self.waits is not None and self.waits.call.count
        return self.waits.call if self.waits is not None and ordered else self.calls[-1]

    def came_to(self, waits: EagerWait) -> bool:
        """True if this rank has come before to the collective that another one waits in."""
        return dict(self.begun).get(waits.ranks, 0) >= waits.count

    def missed(self, other: PostedCalls, rank: int) -> PostedCall | None:
        """The call that another rank makes in place of the collective that this one waits in; None if there is none."""
        waits = self.waits
        if waits is None or not waits.call.count or rank not in waits.ranks or other.came_to(waits):
            return None
        return next((call for call in other.calls if call.count >= waits.call.count), None)

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> PostedCalls:
        """Read what `str` wrote."""
        found = json.loads(text)
        waits = found["waits"]
        if waits is not None:
            waits = EagerWait(tuple(waits["ranks"]), waits["count"], PostedCall(**waits["call"]))
        calls = tuple(PostedCall(**each) for each in found["calls"])
        return PostedCalls(calls, tuple((tuple(key), n) for key, n in found["begun"]), waits)


def wait_cycle(
    rank: int, own: PostedCalls, posted: Callable[[int], PostedCalls | None]
) -> dict[int, EagerWait]:
    """Ranks that wait for one another in eager code, this one first; empty if it may still continue.

    A rank that waits for nobody, because it is slow, ends the search: it will come. Entries that others posted may be
    old, but a cycle that ends at this rank, which does wait, cannot be: no rank of it can have gone on without the
    next one, which has not come.
    """
    seen = {rank}

    def closed(path: dict[int, EagerWait]) -> dict[int, EagerWait]:
        here = [*path.values()][-1]
        if rank in here.ranks and len(path) > 1 and not own.came_to(here):
            return path
        for peer in here.ranks:
            found = None if peer in seen else posted(peer)
            seen.add(peer)
            if found is None or found.waits is None or found.came_to(here):
                continue
            if cycle := closed({**path, peer: found.waits}):
                return cycle
        return {}

    return {} if own.waits is None else closed({rank: own.waits})


@final
class CallLog:
    """The calls of this process so far."""

    def __init__(self) -> None:
        self.begun: Counter[tuple[int, ...]] = Counter()
        self.waits: EagerWait | None = None
        self._recent = deque([PostedCall(0, 0, "the beginning", "", 0)], maxlen=_KEPT)
        # The program that makes the calls.
        self._thread = threading.get_ident()
        self._programs = 0

    def enter(self, text: str) -> int:
        """A call begins; gives the checksum of all calls so far."""
        self._thread = threading.get_ident()
        self._recent.append(self._next(text, user_line()))
        return self.last.chain

    def wait_for(self, ranks: tuple[int, ...], text: str) -> None:
        """Note that this process waits long in its last eager collective among `ranks`."""
        call = self._next(text, user_line())
        if self._thread != threading.get_ident():
            call = replace(call, count=0)
        self.waits = EagerWait(ranks, self.begun[ranks], call)

    def begin_again(self) -> None:
        """All ranks know that their calls differ: they are compared from here."""
        self._recent[-1] = replace(self.last, chain=0)

    def _next(self, text: str, line: tuple[str, int]) -> PostedCall:
        last = self.last
        return PostedCall(last.count + 1, zlib.crc32(text.encode(), last.chain), text, *line)

    def new_program(self) -> int:
        """The number of one more program, from 1."""
        self._programs += 1
        return self._programs

    @property
    def last(self) -> PostedCall:
        """The call that runs, or was the last one."""
        return self._recent[-1]

    def posted(self) -> PostedCalls:
        """The last calls, to be posted."""
        return PostedCalls(tuple(self._recent), tuple(self.begun.items()), self.waits)

    def parted(
        self, other: PostedCalls, rank: int, peer: int
    ) -> tuple[PostedCall, PostedCall] | None:
        """The first call of this rank, `rank`, that differs from what another one posted: this rank's, and `peer`'s."""
        theirs = {call.count: call for call in other.calls}
        for own in self._recent:
            call = theirs.get(own.count)
            if call is not None and call.chain != own.chain:
                return own, call
        mine = self.posted()
        missed, missing = mine.missed(other, peer), other.missed(mine, rank)
        if missed is not None:
            return mine.last, missed
        return None if missing is None else (missing, other.last)


def posted_calls_text(
    calls: CallLog, board: FailureStore, rank: int, ranks: tuple[int, ...]
) -> Callable[[], str]:
    """The function that tells, after a failure, in which call this rank is, and which were the last of others known."""

    def tell() -> str:
        last = {peer: board.posted(peer) for peer in ranks if peer != rank}
        texts = [
            f"rank {peer} was last in {PostedCalls.parse(text).last}"
            for peer, text in last.items()
            if text
        ]
        if calls.last.text.startswith("step "):
            texts.append(_UNEVEN)
        return "; ".join(["", f"rank {rank} is in {calls.last}", *texts])

    return tell


def looking(
    calls: CallLog, board: FailureStore, rank: int, ranks: tuple[int, ...]
) -> Callable[[], None]:
    """The function that a rank calls each second while it waits for others: say in which call it is, look at theirs."""

    def look() -> None:
        board.post(str(calls.posted()))
        for peer in ranks:
            text = board.posted(peer) if peer != rank else ""
            found = calls.parted(PostedCalls.parse(text), rank, peer) if text else None
            if found is not None:
                end = f"; {_UNEVEN}" if found[0].text.startswith("step ") else ""
                error = RankFailure(
                    "the ranks make different calls, and wait for one another; every rank must make the same calls in "
                    f"the same order: rank {rank} is in {found[0]}, rank {peer} in {found[1]}{end}"
                )
                board.announce(error)
                raise error

    return look


# Stamps: what a rank takes to be the same on all ranks in a step, as one number that is sent with messages.
#
# A checksum goes with what ranks send each other anyway, and is compared where it arrives, before what it
# came with is used. 0 is not a checksum.


# Bits of the checksums, from the lowest; one bit above them makes every checksum differ from 0.
_BITS = {"batch": 18, "written": 14, "options": 14, "call": 16}


@final
@dataclass(frozen=True)
class StepChecksum:
    """The number that ranks must agree on.

    Attributes:
        batch: checksum of what the ranks are given alike.
        written: checksum of what eager code wrote into the live model and its optimizers' states.
        options: of the optimizer's hyperparameters, of numbers and tensors outside the model that the step reads, and
            whether the step updates.
        call: of the calls so far (`weft.runtime.failures.call_log`).
    """

    batch: int
    written: int
    options: int
    call: int

    def __int__(self) -> int:
        packed = 1
        for name in reversed(_BITS):
            packed = packed << _BITS[name] | (getattr(self, name) & ((1 << _BITS[name]) - 1))
        return packed


def check_step_checksum(own: int, other: int, peer: int) -> None:
    """Check that the checksum which came with a message is this rank's."""
    if own == other or not own or not other:
        return
    parts = {}
    for name, bits in _BITS.items():
        parts[name] = (own ^ other) & ((1 << bits) - 1)
        own, other = own >> bits, other >> bits
    raise RankFailure(
        _TEXTS[
            next(name for name in ("call", "options", "written", "batch") if parts[name])
        ].format(peer)
    )


_TEXTS = {
    "call": (
        "this rank and rank {} make different calls; every rank must make the same calls of programs, with the same "
        "arguments, and of update() with the same hyperparameters and gradients, in the same order"
    ),
    "options": (
        "this rank and rank {} have different hyperparameters (learning rate, weight decay, …) in the optimizer, or "
        "numbers of Python or tensors outside the model that the step reads, or one of them calls step with "
        "update=False: every rank must set them alike"
    ),
    "written": (
        "this rank and rank {} have written other values into the live model or the optimizer's states since the last "
        "step, as load_state_dict, copy_ or an eager optimizer do: every rank must write the same, with plain tensors "
        "that are the same on all ranks"
    ),
    "batch": (
        "this rank and rank {} were given different batches. A plain tensor is the whole batch, the same on all "
        'ranks; where each process has its own part, as a DistributedSampler gives, say compile(…, batch="local"), or '
        "make global tensors of the parts with weft.from_local. Shuffle with the same seed on all ranks otherwise; "
        "a weft.Loader has the same dataset, seed, sampler and place on all. "
        "Ranks along an axis that does not split the batch, as of tensor parallelism, have the same part: count a "
        "sampler's replicas along the other axes"
    ),
}
