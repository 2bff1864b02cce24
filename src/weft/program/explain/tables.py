"""Tables as plain text: memory, buckets of collectives, kernels, CUDA graphs, how batches come to their steps."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import final

from rich.console import Console
from rich.table import Table

from weft.compiler.schedule.bucket import Bucket
from weft.ir.alias import Memory
from weft.ir.plan import Communicate, RankPlan
from weft.runtime.compiled.parts import Distinct
from weft.runtime.devices.cuda_graphs import GraphRunner
from weft.units import Bytes, bytes_text, counted

# Wide enough that no cell of a row is broken: one row, one line.
WIDTH = 400


def text_of(*parts: Table | str) -> str:
    """Tables and lines, one below the other."""
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True, force_terminal=False)
    for part in parts:
        console.print(part, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def table(
    title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]], total: int | None = None
) -> Table:
    """A table with a column `×` when rows repeat; `total`: bytes a step, for the line below it."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    counted = Counter(rows)
    several = any(count > 1 for count in counted.values())
    for column in (*(("×",) if several else ()), *columns):
        made.add_column(column, overflow="fold")
    for row, count in counted.items():
        made.add_row(*((str(count),) if several else ()), *row)
    if total is not None:
        made.caption = (
            f"{len(counted)} kinds, {counted.total()} boxings, {bytes_text(total)} a step"
        )
        made.caption_justify = "left"
    return made


KINDS = tuple(each.name for each in fields(Memory))


@final
@dataclass(frozen=True)
class RankMemory:
    """The peak of one rank.

    Attributes:
        predicted: what the plan says, by kind, at the moment when it is most.
        measured: what tensors took in the first step at their most; None before it.
    """

    rank: int
    predicted: Memory
    measured: Memory | None


@final
@dataclass(frozen=True)
class ProgramMemory:
    """The peaks of the ranks of this process; prints as a table."""

    ranks: tuple[RankMemory, ...]

    def __iter__(self) -> Iterator[RankMemory]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RankMemory:
        """The memory of a rank, by its number.

        Raises:
            KeyError: for ranks that are not of this process.
        """
        return {each.rank: each for each in self.ranks}[rank]

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> Table:
        """A row for each rank and source."""
        rows = [
            (
                *(str(each.rank), source),
                *(bytes_text(getattr(found, kind)) for kind in (*KINDS, "peak")),
            )
            for each in self.ranks
            for source, found in (("predicted", each.predicted), ("measured", each.measured))
            if found is not None
        ]
        return table(
            "memory at its peak, as the plan states it and as measured",
            ("rank", "", *KINDS, "peak"),
            rows,
        )


def bucket_tables(plan: RankPlan) -> tuple[Table, ...]:
    """The numbers of a rank's collectives and of the buckets that they run in; nothing when all run alone."""
    found: dict[tuple[int, str], list[Bucket]] = {}
    for actor in plan.actors:
        if isinstance(actor, Communicate):
            first = actor.collectives[0]
            key = (first.communicator, first.kind)
            found.setdefault(key, []).append(Bucket(actor.collectives))
    if all(len(bucket.collectives) == 1 for each in found.values() for bucket in each):
        return ()
    rows = []
    for (communicator, kind), buckets in found.items():
        sizes = sorted(sum(value.nbytes for value in bucket.makes) for bucket in buckets)
        number = sum(len(bucket.collectives) for bucket in buckets)
        least, most = (bytes_text(Bytes(size)) for size in (sizes[0], sizes[-1]))
        span = least if least == most else f"{least} to {most}"
        rows.append((str(communicator), kind, str(number), str(len(sizes)), span))
    columns = ("communicator", "kind", "collectives", "in buckets", "bytes of a bucket")
    return (table(f"buckets of rank {plan.rank}", columns, rows),)


def kernel_text(parts: Iterable[Distinct]) -> str:
    """A row for each distinct part: its calls, how often it stands in the plan, its seconds as measured.

    Nothing where all work is ATen code.
    """

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.3f}"

    rows = []
    for one in parts:
        choice = one.choice
        ran = f"ATen ({choice.problem})" if choice.problem else "ATen"
        ran = ran if choice.compiled is None else "Inductor"
        rows.append((str(one.calls), str(one.times), ran, ms(choice.aten), ms(choice.inductor)))
    columns = ("calls", "times", "runs as", "ATen ms", "Inductor ms")
    return text_of("", table("kernels", columns, rows)) if rows else ""


def cuda_graphs_text(replayer: GraphRunner | None) -> str:
    """The segments that a rank replays, and why not the others; nothing where it could replay none."""
    if replayer is None:
        return ""
    found = replayer.replays
    reasons = Counter({**found.reasons, **replayer.stopped}.values())
    graphs = len(replayer.plan.replayed - replayer.stopped.keys())
    title = f"CUDA graphs of rank {replayer.plan.rank}"
    estimate = (
        f"{found.launches} launches a step: {found.host * 1e3:.2f} ms of the host, "
        f"{found.device * 1e3:.2f} ms of the device (estimated); graphs spare {found.saved}"
    )
    rows = [(str(graphs), "replayed"), *((str(count), why) for why, count in reasons.items())]
    return text_of("", table(title, ("segments", "how"), rows), estimate)


def loading_text(plan: RankPlan | None) -> str:
    """The plan of the last loop that loaded ahead, as text, and how much its registers hold; nothing of None."""
    if plan is None:
        return ""
    held = sum(each.credits * each.value.nbytes for each in plan.registers)
    # Registers of one actor have equal credits.
    credits = {each.producer: each.credits for each in plan.registers}
    ahead = counted(sum(credits.values()), "batch", "batches")
    return (
        f"loading ahead of the steps, by the last loop: {ahead}, {bytes_text(Bytes(held))} in registers at most, "
        f"beside the batch of the step\n{plan}"
    )
