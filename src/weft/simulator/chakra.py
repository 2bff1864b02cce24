"""Write the execution traces of a planned step: a file for each rank, and one with the communicators."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, final

from weft.errors import RuleError, UserError
from weft.hardware.costs import Costs
from weft.hardware.durations import larger_side, update_bytes
from weft.ir.plan import Actor, Collective, Communicate, Compute, LocalCall, LocalValue, RankPlan
from weft.ops import flops, traffic
from weft.simulator.steps.acts import ActCosts
from weft.simulator.steps.planned import PlannedStep, values_of
from weft.simulator.steps.transfers import Transfers
from weft.simulator.timing.tasks import Tasks, meets, tasks_of
from weft.traces.events import actor_name, lines_of

# The schema is et_def.proto of MLCommons Chakra (github.com/mlcommons/chakra, schema/protobuf); fields that are not
# written here have their defaults. A message is a sequence of fields, each a varint of its number and type, then its
# content (protobuf.dev/programming-guides/encoding). In a file each message stands behind a varint of its length.
Value: TypeAlias = "bool | int | str"
ChakraKind: TypeAlias = Literal["compute", "send", "receive", "collective"]

# Of the enumeration NodeType.
_NODE_TYPES: Mapping[ChakraKind, int] = {"compute": 4, "send": 5, "receive": 6, "collective": 7}
# Of the enumeration CollectiveCommType.
COLLECTIVE_TYPES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
# The version that the generators of the format's owners write.
VERSION = "0.0.4"
_VARINT, _BYTES = 0, 2


@final
@dataclass(frozen=True, slots=True)
class ChakraNode:
    """A node of an execution trace.

    Attributes:
        id: unique on its rank.
        name: for people.
        kind: what runs.
        needs: ids of nodes whose data it reads, or whose copies it takes.
        after: ids of nodes that it only runs after.
        micros: microseconds that it lasts.
        attributes: by name; whole numbers are written as uint64.
    """

    id: int
    name: str
    kind: ChakraKind
    needs: Sequence[int] = ()
    after: Sequence[int] = ()
    micros: int = 0
    attributes: Mapping[str, Value] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The message."""
        return b"".join(
            (
                _number(1, self.id),
                _text(2, self.name),
                _number(3, _NODE_TYPES[self.kind]),
                _numbers(4, self.after),
                _numbers(5, self.needs),
                _number(7, self.micros),
                *(_part(10, _attribute(*each)) for each in self.attributes.items()),
            )
        )


def trace_bytes(nodes: Iterable[ChakraNode]) -> bytes:
    """The file of one rank: what version it has, then its nodes."""
    messages = (_text(1, VERSION), *(node.encoded() for node in nodes))
    return b"".join(_varint(len(each)) + each for each in messages)


def _attribute(name: str, value: Value) -> bytes:
    """An AttributeProto; a truth value is written even when it is false, as a field of a `oneof` is."""
    if isinstance(value, bool):
        return _text(1, name) + _key(27, _VARINT) + _varint(int(value))
    if isinstance(value, int):
        return _text(1, name) + _key(13, _VARINT) + _varint(value)
    return _text(1, name) + _part(29, value.encode())


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(0x80 | (value & 0x7F))
        value >>= 7
    found.append(value)
    return bytes(found)


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _number(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value) if value else b""


def _numbers(number: int, values: Sequence[int]) -> bytes:
    return _part(number, b"".join(map(_varint, values))) if values else b""


def _text(number: int, value: str) -> bytes:
    return _part(number, value.encode())


def _part(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


@final
class ChakraNodes:
    """Makes the nodes of ranks.

    Args:
        step: what runs.
        tasks: of one step.
        costs: of the machine.
    """

    def __init__(self, step: PlannedStep, tasks: Tasks, costs: Costs) -> None:
        self._step, self._tasks = step, tasks
        self._transfers = Transfers(step, costs)
        self._lines = lines_of(step.graph)
        self._groups = {one.id: frozenset(one.ranks) for one in step.communicators}
        self._work: dict[tuple[int, int], dict[str, Value]] = {}

    def of(self, plan: RankPlan, rank: int) -> list[ChakraNode]:
        """The nodes of a rank, for which a plan stands.

        Raises:
            UserError: when nobody knows which communicators the rank has.
        """
        acts = _acts(self._tasks, plan.rank)
        values = values_of(plan)
        ids: dict[int, list[int]] = {}
        found: list[ChakraNode] = []
        for task, id, micro in acts:
            actor = plan.actors[id]
            after = self._before(task, actor.queue)
            base = ChakraNode(
                0,
                f"{actor_name(actor, self._lines)} {micro}",
                "compute",
                [
                    one
                    for need in self._tasks.needs[task]
                    if need not in after
                    for one in ids.get(need, ())
                ],
                [one for need in after for one in ids.get(need, ())],
                round(self._tasks.seconds[task] * 1e6),
            )
            made = list(self._nodes(base, plan, actor, rank, task, values))
            numbered = [replace(each, id=len(found) + place) for place, each in enumerate(made)]
            ids[task] = [each.id for each in numbered]
            found.extend(numbered)
        return found

    def _before(self, task: int, queue: str) -> list[int]:
        """The communication before one in the order of their communicator; none of other tasks."""
        lane = self._tasks.lane[task]
        same = (one for one in self._tasks.needs[task] if self._tasks.lane[one] == lane)
        return sorted(same)[-1:] if meets(queue) else []

    def _nodes(
        self,
        base: ChakraNode,
        plan: RankPlan,
        actor: Actor,
        rank: int,
        task: int,
        values: Mapping[str, LocalValue],
    ) -> Iterator[ChakraNode]:
        if not isinstance(actor, Communicate):
            yield _with(base, "compute", self._compute(plan, actor, values))
            return
        first = actor.collectives[0]
        if isinstance(first, Collective):
            group = self._group(first.communicator, rank)
            size = sum(
                larger_side(each) for each in actor.collectives if isinstance(each, Collective)
            )
            attributes: dict[str, Value] = {
                "is_cpu_op": False,
                "comm_type": COLLECTIVE_TYPES[first.kind],
                "comm_size": size,
                "pg_name": str(group_name(group)),
            }
            yield _with(base, "collective", attributes)
            return
        pieces = [each for each in self._transfers.pieces(plan.rank, actor) if each[0] == rank]
        for _, source, target, size in pieces:
            ends: dict[str, Value] = {
                "is_cpu_op": False,
                "comm_src": source,
                "comm_dst": target,
                "comm_tag": task,
                "comm_size": size,
            }
            yield _with(base, "send" if source == rank else "receive", ends)
        if not pieces:
            # It sends nothing, but others wait for it.
            yield _with(base, "compute", {"is_cpu_op": True})

    def _compute(
        self, plan: RankPlan, actor: Actor, values: Mapping[str, LocalValue]
    ) -> dict[str, Value]:
        """Operations and bytes of a segment; acts of the host have neither."""
        if not isinstance(actor, Compute):
            return {"is_cpu_op": True}
        key = plan.rank, actor.id
        if key not in self._work:
            work = moved = 0
            for node in actor.nodes:
                if isinstance(node, LocalCall):
                    try:
                        call = node.first
                        work, moved = work + flops(call), moved + traffic(call)
                    except RuleError:
                        continue
                else:
                    moved += update_bytes(node, values)
            self._work[key] = {"is_cpu_op": False, "num_ops": work, "tensor_size": moved}
        return self._work[key]

    def _group(self, communicator: int, rank: int) -> int:
        """The communicator of a rank's own, of those that run the same."""
        family = self._step.families.get(communicator, (communicator,))
        for one in (communicator, *family):
            if rank in self._groups.get(one, ()):
                return one
        raise UserError(
            f"rank {rank} has no plan of its own, and nobody knows which communicator it has where the rank that "
            f"stands for it has communicator {communicator}; plan all ranks to write their traces"
        )


def group_name(communicator: int) -> int:
    """The number of a communicator in trace files, where 0 is none."""
    return communicator + 1


def check_pieces(nodes: Mapping[int, Sequence[ChakraNode]]) -> None:
    """Every piece that is sent is received.

    Raises:
        UserError: when one is not: the trace would make a simulator wait for ever.
    """
    open_pieces: dict[tuple[Value, ...], int] = defaultdict(int)
    for own in nodes.values():
        for node in own:
            if node.kind in ("send", "receive"):
                ends = tuple(
                    node.attributes[f"comm_{name}"] for name in ("src", "dst", "tag", "size")
                )
                open_pieces[ends] += 1 if node.kind == "send" else -1
    for (source, target, *_), left in open_pieces.items():
        if left:
            raise UserError(
                f"what rank {source} sends to rank {target} and what that one receives differ: their plans are "
                "those of other ranks, which do not exchange in the same way; plan all ranks to write their traces"
            )


def _acts(tasks: Tasks, rank: int) -> list[tuple[int, int, int]]:
    """(task, actor, micro-batch) of a rank, each behind those that it waits for."""
    own = {}
    for task, members in enumerate(tasks.members):
        for member, actor, _, micro in members:
            if member == rank:
                own[task] = (task, actor, micro)
    found, seen = list[tuple[int, int, int]](), set[int]()
    for task in own:
        stack = [task]
        while stack:
            top = stack[-1]
            left = [one for one in tasks.needs[top] if one in own and one not in seen]
            if left and top not in seen:
                stack.extend(reversed(left))
                continue
            stack.pop()
            if top not in seen:
                seen.add(top)
                found.append(own[top])
    return found


def _with(base: ChakraNode, kind: ChakraKind, attributes: Mapping[str, Value]) -> ChakraNode:
    return replace(base, kind=kind, attributes=attributes)


# More files than this are not written at once.
MOST_RANKS = 4096


def write_chakra(
    step: PlannedStep, acts: ActCosts, costs: Costs, folder: str | Path
) -> Sequence[Path]:
    """Write Chakra execution traces of one step, as ASTRA-sim reads them.

    `rank.<r>.et` has the nodes of rank `r`; the folder with "rank" is the prefix that ASTRA-sim takes.
    `comm_groups.json` has the ranks of each communicator. Calls have their seconds, in whole
    microseconds, their operations and their bytes; exchanges only their bytes.

    Args:
        step: what runs.
        acts: what its acts cost.
        costs: of the machine.
        folder: made where it is missing.

    Returns:
        The files.

    Raises:
        UserError: when there are too many ranks, a rank's exchanges are not known, or the files cannot be written.
    """
    if len(step.ranks) > MOST_RANKS:
        raise UserError(
            f"traces are files for each rank: expected at most {MOST_RANKS} ranks, found {len(step.ranks)}"
        )
    contents = _contents(step, acts, costs)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (Path(folder) / name).write_bytes(content)
    except OSError as error:
        raise UserError(
            f"cannot write the traces to {folder}: {error.strerror}; give a folder that can be written"
        ) from error
    return [Path(folder) / name for name in contents]


def _contents(step: PlannedStep, acts: ActCosts, costs: Costs) -> dict[str, bytes]:
    """The files by name."""
    seconds = {plan.rank: acts.seconds(plan.rank) for plan in step.plans}
    making = ChakraNodes(step, tasks_of(step.plans, seconds), costs)
    plans = {plan.rank: plan for plan in step.plans}
    nodes = {
        rank: making.of(plans[first], rank)
        for first, members in step.members.items()
        if first in plans
        for rank in members
    }
    check_pieces(nodes)
    found = {f"rank.{rank}.et": trace_bytes(own) for rank, own in sorted(nodes.items())}
    groups = {str(group_name(one.id)): list(one.ranks) for one in step.communicators}
    return {**found, "comm_groups.json": json.dumps(groups).encode()}
