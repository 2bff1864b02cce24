"""The table of buckets in `explain`: which collectives of a plan run as one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from weft.compiler.bucket import Bucket
from weft.ir.memory import value_bytes
from weft.ir.plan import Communicate, RankPlan
from weft.program.tables import table
from weft.units import Bytes, bytes_text


def bucket_tables(plan: RankPlan) -> tuple[Table, ...]:
    """How many collectives of a rank run in how many buckets; nothing when all run alone."""
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
