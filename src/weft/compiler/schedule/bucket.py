"""Join small collectives: one call for many gradients or parameters costs one latency instead of many.

Before: a draft with its program, one collective after another. After: a `Schedule`, in which reductions on one
communicator that nothing waits for yet are adjacent, and so are all-gathers of parameters. Every rank of a
communicator decides alike: the sizes, the order and the readers that decide are the same on all of them.

Sums over micro-batches of communicated values wait only for the end of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import TypeAlias, final

from weft.compiler.context import Context
from weft.compiler.schedule.draft import Bucket, PlanDraft, ScheduleItem
from weft.ir.nodes import FORWARD, OVER_STEP, Phase
from weft.ir.plan import Collective, Exchange, LocalCall, LocalNode, LocalProgram, LocalUpdate
from weft.ops.signatures import BLANK
from weft.ops.weft_ops import ops_that

_URGENT = ops_that("urgent")
# How much larger buckets of gathers may be than those of reductions.
GATHERED = 8
# In how many buckets at most a communicator reduces once a step what micro-batches add up: each cuts
# the loop, and so is acts of every micro-batch to plan and to run.
CUTS = 64
# The latency of a bucket of `bucket_bytes` over the seconds of its bytes (`hardware/planning_costs.py`).
LATENCY = 0.05


def bucket(draft: PlanDraft, context: Context) -> PlanDraft:
    """The draft with the nodes of its program in order, reductions and gathers joined into buckets.

    A bucket starts as soon as its tensors have `Context.bucket_bytes` on a rank: larger ones save latency,
    smaller ones start earlier, and leave less for the end, where nothing hides it. Gathers of
    parameters are done ahead of their readers: up to `GATHERED` times as much goes together.

    A reduction that the very next calls read (`urgent` in `weft.ops.weft_ops`) does not wait for gradients of
    weights. Only what runs equally often is joined, and with several stages only within a phase. The
    addition of a micro-batch to a sum follows its bucket, and closes no bucket.
    """
    program = draft.program
    calls = [node for node in program.nodes if isinstance(node, LocalCall)]
    urgent = {
        value.name for call in calls if op_on_all_ranks(call) in _URGENT for value in call.makes
    }
    once, again = Counter[int](), Counter[int]()
    for node in program.nodes if program.loop else ():
        if isinstance(node, Collective) and node.kind in ("all_reduce", "reduce_scatter"):
            found = again if node.output.name in program.loop else once
            found[node.communicator] += node.input.nbytes
    staged, sums = len(context.stages.placements) > 1, sums_of_communicated(program.nodes)
    parameters, limit = parameter_values(program), context.bucket_bytes
    joiner = _Joiner(limit, program.loop, staged, parameters, once, again, urgent, sums)
    for node in program.nodes:
        joiner.add(node)
    joiner.close(joiner.open)
    return replace(draft, schedule=tuple(joiner.items))


# Communicator, kind, reduction, dtype, whether it runs for each micro-batch, and the phase.
_Kind: TypeAlias = tuple[int, str, str, str, bool, Phase]


@final
@dataclass(slots=True, eq=False)
class _Joiner:
    """Puts the nodes of a program in order, and collectives into buckets.

    Attributes:
        loop: values of which there is one for each micro-batch.
        staged: true if only what is of one phase is joined.
        parameters: values that are made of parameters alone.
        once, again: for each communicator, the bytes that are reduced once a step after a loop, and in an act of one.
        urgent: values that are reduced alone and at once.
        sums: communicated values that are added up over the micro-batches, and what comes of them.
        open: of each kind, the collectives that wait to be joined.
        behind: of each kind, the calls that add up what these bring.
        kinds: of what both make, the kind.
    """

    limit: int
    loop: frozenset[str]
    staged: bool
    parameters: frozenset[str]
    once: Counter[int]
    again: Counter[int]
    urgent: Collection[str]
    sums: frozenset[str]
    items: list[ScheduleItem] = field(default_factory=list)
    open: dict[_Kind, list[Collective]] = field(default_factory=dict)
    behind: dict[_Kind, list[LocalCall]] = field(default_factory=dict)
    kinds: dict[str, _Kind] = field(default_factory=dict)

    def add(self, node: LocalNode) -> None:
        found = {self.kinds[name] for name in node.reads if name in self.kinds}
        adds = any(value.name in self.sums for value in node.makes)
        if found and adds and isinstance(node, LocalCall):
            (key,) = found  # a sum reads one value
            self.behind.setdefault(key, []).append(node)
            self.kinds[node.makes[0].name] = key
            return
        self.close(key for key in self.open if key in found)
        if not isinstance(node, Exchange):
            self.items.append(node)
        elif isinstance(node, Collective) and node.input.name in self.urgent:
            self.items.append(Bucket((node,)))
        elif isinstance(node, Collective) and (
            node.kind in ("all_reduce", "reduce_scatter")
            or (node.kind == "all_gather" and node.input.name in self.parameters)
        ):
            self._join(node)
        else:
            self.close(key for key in self.open if key[0] == node.communicator)
            self.items.append(Bucket((node,)))

    def close(self, keys: Iterable[_Kind]) -> None:
        for key in tuple(keys):
            items = (Bucket(tuple(self.open.pop(key))), *self.behind.pop(key, ()))
            self.items.extend(items)
            for value in (value for item in items for value in item.makes):
                del self.kinds[value.name]

    def _join(self, node: Collective) -> None:
        looped = node.output.name in self.loop
        phase = node.phase if self.staged else FORWARD
        key = (node.communicator, node.kind, node.reduction, node.input.dtype, looped, phase)
        waiting = self.open.setdefault(key, [])
        waiting.append(node)
        self.kinds[node.output.name] = key
        # Bytes that a rank gives, on average: shards that are not even differ between ranks.
        gathers = node.kind == "all_gather"
        given = (
            each.output.nbytes // len(each.sizes) if gathers else each.input.nbytes
            for each in waiting
        )
        # In a loop the seconds of the last bucket, and the latencies of all, are added to each act. Their sum is least
        # for the geometric mean of the bytes of an act and of those that take as long as a latency.
        if gathers:
            limit = self.limit * GATHERED
        elif looped:
            again = self.again[node.communicator]
            limit = min(self.limit, isqrt(int(again * self.limit * LATENCY)))
        else:
            limit = max(self.limit, self.once[node.communicator] // CUTS)
        if sum(given) >= limit:
            self.close([key])


def parameter_values(
    program: LocalProgram, which: Callable[[str], bool] = lambda _: True
) -> frozenset[str]:
    """The parameters of which keys say so, and what calls make of nothing else, such as casts."""
    found = {
        item.value.name for item in program.inputs if item.role == "parameter" and which(item.key)
    }
    for node in program.nodes:
        if isinstance(node, LocalCall) and node.reads and node.reads <= found:
            found.update(value.name for value in node.makes)
    return frozenset(found)


def sums_of_communicated(items: Sequence[LocalNode | Bucket]) -> frozenset[str]:
    """Communicated values that only become a sum over micro-batches, what calls make of one of them, and the sum."""
    readers: dict[str, list[LocalNode | Bucket]] = {}
    for item in items:
        for name in item.reads:
            readers.setdefault(name, []).append(item)
    communicated = (each for each in items if not isinstance(each, LocalCall | LocalUpdate))
    names = (value.name for each in communicated for value in each.makes)
    return frozenset(made for name in names for made in _way_to_sum(name, readers))


def _way_to_sum(name: str, readers: Mapping[str, list[LocalNode | Bucket]]) -> Iterator[str]:
    """The values from a communicated one to its sum over micro-batches; none where anything else reads one of them."""
    way = [name]
    while len(found := readers.get(name, [])) == 1:
        reader = found[0]
        if not isinstance(reader, LocalCall) or len(reader.reads) != 1 or len(reader.makes) != 1:
            return
        name = reader.makes[0].name
        way.append(name)
        if op_on_all_ranks(reader) in OVER_STEP:
            yield from way
            return


def op_on_all_ranks(call: LocalCall) -> object:
    """The op, on a rank without elements that of the other ranks."""
    return call.args[2] if call.op == BLANK else call.op
