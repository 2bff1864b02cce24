"""Copies of activations for torch's pipeline schedules: weft's beside those of torch's analysis, at equal times.

    python -m benchmarks.copies --json docs/results/copies.json

Each forward takes a second, a backward two, one for inputs and one for weights where it is split; transfers none. Of
torch come the lists of acts of its own schedules, and the slots that they need (`torch_orders.py`); of weft plans of
the same stages, as the compiler schedules them by name (`unit_stages.py`). Where these keep more, or take longer, it is
looked whether they do so with few micro-batches in flight, as `in_flight` of a strategy gives them: half of 1F1B's and
some more, or as many as there are stages, shared by those of the first turn and of the second as three to one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import final

from benchmarks.copies.torch_orders import orders, seconds, slots
from benchmarks.copies.unit_stages import Draft, Layout, drafted, homes
from weft.search.moves.neighbours import half_in_flight
from weft.strategy.parts import Schedule

RANKS, MICRO_BATCHES = (2, 4, 8), (4, 8, 16, 32)


@final
@dataclass(frozen=True)
class Peer:
    """A schedule of torch's, and weft's for the same stages.

    Attributes:
        torch: the name of its class.
        layout: of its stages on ranks.
        name: of weft's.
        few: those whose gradients of weights are put off, with few micro-batches in flight.
    """

    torch: str
    layout: Layout
    name: Schedule
    few: tuple[Schedule, ...] = ()


PEERS = (
    Peer("ScheduleGPipe", "one", "gpipe"),
    Peer("Schedule1F1B", "one", "1f1b"),
    Peer("ScheduleInterleavedZeroBubble", "one", "zero_bubble"),
    Peer("ScheduleInterleaved1F1B", "round", "interleaved", ("zero_bubble",)),
    Peer("ScheduleInterleavedZeroBubble", "round", "zero_bubble", ("zero_bubble",)),
    Peer("ScheduleZBVZeroBubble", "v", "zero_bubble", ("interleaved",)),
    Peer("ScheduleDualPipeV", "v", "zero_bubble", ("interleaved",)),
)


@final
@dataclass(frozen=True)
class Found:
    """A plan of weft's.

    Attributes:
        seconds: of a step.
        kept: for each rank, the most activations that it keeps at a time.
        copies: of the register of each stage.
        held: no more is kept on any rank than torch's slots, in no more time.
    """

    seconds: float
    kept: tuple[int, ...]
    copies: dict[str, int]
    held: bool


@final
@dataclass(frozen=True)
class Row:
    """A schedule on so many ranks.

    Attributes:
        torch, layout, ranks, micro_batches: which.
        seconds, slots: of torch's.
        named: weft's of that name.
        few: with few micro-batches in flight, where the named one keeps more or takes longer.
    """

    torch: str
    layout: Layout
    ranks: int
    micro_batches: int
    seconds: int
    slots: tuple[int, ...]
    named: Found
    few: Found | None = None


def rows() -> Iterator[Row]:
    """All schedules, but those that torch does not have for so few micro-batches."""
    for peer, ranks, micro_batches in product(PEERS, RANKS, MICRO_BATCHES):
        try:
            lists = orders(peer.torch, homes(peer.layout, ranks), micro_batches)
        except (ValueError, RuntimeError) as error:
            print(f"{peer.torch} on {ranks} ranks, {micro_batches} micro-batches: {error}")
            continue
        yield row(
            peer,
            ranks,
            micro_batches,
            seconds(lists, len(homes(peer.layout, ranks))),
            tuple(map(slots, lists)),
        )


def row(peer: Peer, ranks: int, micro_batches: int, most: int, allowed: tuple[int, ...]) -> Row:
    """Weft's beside torch's seconds and slots."""

    def found(draft: Draft) -> Found:
        kept = tuple(draft.kept(rank) for rank in range(ranks))
        fits = all(own <= its for own, its in zip(kept, allowed, strict=True))
        return Found(draft.seconds, kept, draft.copies, fits and draft.seconds <= most)

    named = found(drafted(peer.name, peer.layout, ranks, micro_batches))
    drafts = (
        drafted(name, peer.layout, ranks, micro_batches, given)
        for name in peer.few
        for given in few_in_flight(peer.layout, ranks, micro_batches)
    )
    tried = () if named.held else map(found, drafts)
    few = min(tried, key=lambda each: (not each.held, each.seconds, each.kept), default=None)
    return Row(peer.torch, peer.layout, ranks, micro_batches, most, allowed, named, few)


def few_in_flight(layout: Layout, ranks: int, micro_batches: int) -> Iterator[tuple[int, ...]]:
    """The micro-batches in flight of each stage, in the ways that are tried."""
    stages = len(homes(layout, ranks))
    for more in {1, max(1, ranks // 2)}:
        yield half_in_flight(stages, more, micro_batches)
    first = min(3 * stages // 4, micro_batches)
    yield (first,) * ranks + (stages - first,) * ranks


def main() -> None:
    """Print a line for each, and what holds in all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    chosen = parser.parse_args()
    found: list[Row] = []
    begun = time.process_time()
    for each in rows():
        found.append(each)
        few = f"; few {each.few.kept} in {each.few.seconds:g} s" if each.few else ""
        print(
            f"{each.torch} {each.layout} {each.ranks} x {each.micro_batches}: torch {each.slots} in {each.seconds} s; "
            f"weft {each.named.kept} in {each.named.seconds:g} s{few}",
            flush=True,
        )
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(one) for one in found]) + "\n")
    named = sum(each.named.held for each in found)
    others = [each.few.held for each in found if each.few]
    print(
        f"{named} of {len(found)} keep no more as compiled; of {len(others)} others {sum(others)} with few in flight; "
        f"{time.process_time() - begun:.0f} s of CPU"
    )


if __name__ == "__main__":
    main()
