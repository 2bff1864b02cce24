"""Tables of `explain` on how segments run: buckets of collectives, kernels of distinct parts, CUDA graphs; how batches
come to their steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from weft.compiler.schedule.bucket import Bucket
from weft.ir.alias import value_bytes
from weft.ir.plan import Communicate, RankPlan
from weft.program.explain.tables import table, text_of
from weft.runtime.compiled.choice import KernelChoice
from weft.runtime.compiled.parts import Distinct
from weft.runtime.devices.replay import Replayer
from weft.units import ITEM_SIZE, Bytes, bytes_text, counted


def bucket_tables(plan: RankPlan) -> tuple[Table, ...]:
    """The numbers of a rank's collectives and of the buckets that they run in; nothing when all run alone."""
    found: dict[tuple[int, str], list[Bucket]] = {}
    for actor in plan.actors:
        if isinstance(actor, Communicate):
            first = actor.collectives[0]
            key = (first.communicator, first.kind)
            found.setdefault(key, []).append(Bucket(actor.collectives))
    rows = [
        (str(communicator), kind, *_row(buckets)) for (communicator, kind), buckets in found.items()
    ]
    if all(len(bucket.collectives) == 1 for each in found.values() for bucket in each):
        return ()
    columns = ("communicator", "kind", "collectives", "in buckets", "bytes of a bucket")
    return (table(f"buckets of rank {plan.rank}", columns, rows),)


def _row(buckets: Sequence[Bucket]) -> tuple[str, str, str]:
    sizes = sorted(sum(value_bytes(value) for value in bucket.makes) for bucket in buckets)
    number = sum(len(bucket.collectives) for bucket in buckets)
    least, most = (bytes_text(Bytes(size)) for size in (sizes[0], sizes[-1]))
    return str(number), str(len(sizes)), least if least == most else f"{least} to {most}"


def kernel_text(parts: Iterable[Distinct]) -> str:
    """The table as text; nothing where all work is ATen code."""
    every = tuple(parts)
    return text_of("", kernel_table(every)) if every else ""


def kernel_table(parts: Iterable[Distinct]) -> Table:
    """One row for each distinct part: its calls, how often it stands in the plan, its seconds as measured."""
    rows = [
        (
            str(one.calls),
            str(one.times),
            _ran(one.choice),
            _ms(one.choice.aten),
            _ms(one.choice.inductor),
        )
        for one in parts
    ]
    columns = ("calls", "times", "runs as", "ATen ms", "Inductor ms")
    return table("kernels", columns, rows)


def _ran(choice: KernelChoice) -> str:
    if choice.compiled is not None:
        return "Inductor"
    return f"ATen ({choice.problem})" if choice.problem else "ATen"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def replay_text(replayers: Iterable[Replayer | None]) -> str:
    """For each rank that could replay segments, how much it does; nothing where none could."""
    return "".join(_text(each) for each in replayers if each is not None)


def _text(replayer: Replayer) -> str:
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
    held = sum(
        each.credits * math.prod(each.value.shape) * ITEM_SIZE[each.value.dtype]
        for each in plan.registers
    )
    # Registers of one actor have equal credits.
    credits = {each.producer: each.credits for each in plan.registers}
    ahead = counted(sum(credits.values()), "batch", "batches")
    return (
        f"loading ahead of the steps, by the last loop: {ahead}, {bytes_text(Bytes(held))} in registers at most, "
        f"beside the batch of the step\n{plan}"
    )
