"""Cut a schedule into actors: maximal runs of local work between communications.

Before: a `Schedule` of one rank. After: actors in the order of their work. A run ends where a communication can start
(its input is there), and where the next node waits for a communication that the run has not waited for yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.compiler.aliases import variable_views
from weft.compiler.bucket import Bucket, Schedule, node_reads
from weft.ir.plan import (
    Actor,
    Communicate,
    Communicator,
    Compute,
    Feed,
    Fetch,
    Hold,
    LocalCall,
    LocalProgram,
    LocalUpdate,
)


def segment(
    program: LocalProgram, schedule: Schedule, communicators: Sequence[Communicator]
) -> tuple[Actor, ...]:
    """The actors of one rank: hold, feed, then segments and communications, then fetch."""
    body = _Cutter({item.value.name for item in program.inputs})
    for item in _updates_when_ready(schedule):
        body.add(item)
    body.cut()
    queues = {communicator.id: communicator.queue for communicator in communicators}
    return _numbered(program, body.work, queues)


def _updates_when_ready(schedule: Schedule) -> Schedule:
    """Updates last, in the order in which their sources are there, so that early ones need not wait for late ones."""
    made: dict[str, int] = {}
    for position, item in enumerate(schedule):
        made.update((name, position) for name in _makes(item))
    work = tuple(item for item in schedule if not isinstance(item, LocalUpdate))
    updates = [item for item in schedule if isinstance(item, LocalUpdate)]
    return (*work, *sorted(updates, key=lambda update: made.get(update.source, -1)))


def _makes(item: LocalCall | LocalUpdate | Bucket) -> Iterable[str]:
    match item:
        case LocalCall(outputs=outputs):
            return (value.name for value in outputs if value is not None)
        case Bucket(collectives=collectives):
            return (collective.output.name for collective in collectives)
        case _:
            return ()


@dataclass
class _Cutter:
    """`work` holds finished runs and buckets; `run` is the run that grows.

    Attributes:
        outside: values that are there without waiting: inputs, and everything that earlier runs made.
        waited: communicated values that `run` waits for before it starts.
        made: values that `run` makes.
    """

    outside: set[str]
    work: list[tuple[LocalCall | LocalUpdate, ...] | Bucket] = field(default_factory=list)
    run: list[LocalCall | LocalUpdate] = field(default_factory=list)
    waited: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)

    def add(self, item: LocalCall | LocalUpdate | Bucket) -> None:
        if isinstance(item, Bucket):
            if any(collective.input.name in self.made for collective in item.collectives):
                self.cut()
            self.work.append(item)
            return
        late = node_reads(item) - self.outside - self.made - self.waited
        if late and self.run:
            self.cut()
        self.waited |= late
        self.run.append(item)
        self.made.update(_makes(item))

    def cut(self) -> None:
        """End the run that grows."""
        if not self.run:
            return
        self.work.append(tuple(self.run))
        self.outside |= self.made | self.waited
        self.run, self.waited, self.made = [], set(), set()


def _numbered(
    program: LocalProgram,
    work: Sequence[tuple[LocalCall | LocalUpdate, ...] | Bucket],
    queues: dict[int, str],
) -> tuple[Actor, ...]:
    """Give every actor its number, its queue, and the registers that it reads and writes."""
    updated = {
        name
        for run in work
        if isinstance(run, tuple)
        for node in run
        if isinstance(node, LocalUpdate)
        for name in (node.target, *node.states)
    }
    kept = (item for item in program.inputs if item.role != "batch")
    fed = [item for item in program.inputs if item.role == "batch"]
    hold = Hold(0, tuple(item.value.name for item in kept if item.value.name not in updated))
    feed = Feed(1, tuple(item.key for item in fed), tuple(item.value.name for item in fed))
    actors: list[Actor] = [hold, feed]
    readers = _readers(program, work)
    bases = variable_views(program)
    for run in work:
        number = len(actors)
        if isinstance(run, Bucket):
            queue = queues[run.collectives[0].communicator]
            actors.append(Communicate(number, run.collectives, queue))
        else:
            actors.append(_compute(number, run, readers, bases))
    keys = tuple(output.key for output in program.outputs)
    names = tuple(output.name for output in program.outputs)
    return (*actors, Fetch(len(actors), keys, names))


def _readers(
    program: LocalProgram, work: Sequence[tuple[LocalCall | LocalUpdate, ...] | Bucket]
) -> dict[str, set[int]]:
    """For each value, the places in `work` that read it; -1 stands for the caller."""
    found: dict[str, set[int]] = {output.name: {-1} for output in program.outputs}
    for place, run in enumerate(work):
        nodes = run.collectives if isinstance(run, Bucket) else run
        for node in nodes:
            for name in node_reads(node):
                found.setdefault(name, set()).add(place)
    return found


def _compute(
    number: int,
    run: tuple[LocalCall | LocalUpdate, ...],
    readers: dict[str, set[int]],
    bases: dict[str, str],
) -> Compute:
    place = number - 2  # hold and feed stand before the work
    made = [name for node in run for name in _makes(node)]
    reads = dict.fromkeys(name for node in run for name in sorted(node_reads(node)))
    # Who reads a view of a variable reads the variable: an update must wait for it.
    reads.update(dict.fromkeys(bases[name] for name in tuple(reads) if name in bases))
    updated = dict.fromkeys(
        name
        for node in run
        if isinstance(node, LocalUpdate)
        for name in (node.target, *node.states)
    )
    inside = {*made, *updated}
    leaving = [name for name in made if readers.get(name, set()) - {place}]
    consumes = tuple(name for name in reads if name not in inside)
    return Compute(number, run, consumes, (*leaving, *updated))
