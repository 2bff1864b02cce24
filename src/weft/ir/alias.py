"""Values that share memory, found by one walk over local nodes with the rules of their ops.

An op whose rule says that it shares may return its first operand or a view of it; every other op
makes memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, final

from weft.ir.nodes import OVER_STEP
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    LocalCall,
    LocalNode,
    LocalProgram,
    LocalUpdate,
    RankPlan,
)
from weft.ir.plan_nodes import RegisterKind
from weft.ops.rule import sharing_ops
from weft.units import NO_BYTES, Bytes


def view_bases(
    nodes: Iterable[LocalNode], sharing: Collection[str] | None = None
) -> dict[str, str]:
    """For each result of a call that may share memory with an operand: the value that first had that memory.

    Args:
        sharing: the ops that do so; by default those of which rules say it.
    """
    sharing = sharing_ops() if sharing is None else sharing
    bases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, LocalCall) and node.op in sharing:
            first = next(iter(node.uses), None)
            if first is not None:
                base = bases.get(first, first)
                bases.update((value.name, base) for value in node.makes)
    return bases


def variable_views(program: LocalProgram) -> dict[str, str]:
    """For each value that may share memory with a variable or constant: the name of that input; inputs included."""
    lasting = {item.value.name for item in program.inputs if item.role != "batch"}
    views = view_bases(program.nodes)
    return {name: name for name in lasting} | {
        name: base for name, base in views.items() if base in lasting
    }


def copied_results(plan: RankPlan, actor: Compute) -> tuple[str, ...]:
    """The values that a segment must hand on as copies: those in the memory of variables that some segment overwrites.

    Readers of a view of a variable hold back its update. The sources of updates are read while
    other variables are written, and results live on after the step.
    """
    sources = [node.source for node in actor.nodes if isinstance(node, LocalUpdate)]
    leaving = {*sources, *plan.fetched.intersection(actor.produces)}
    if not leaving:
        return ()
    bases = view_bases(actor.nodes)
    return tuple(sorted(name for name in leaving if bases.get(name, name) in plan.rewritten))


def overwritable(plan: RankPlan) -> frozenset[str]:
    """The registers over which the one all-reduce that reads them may write its result."""
    given = {item.value.name for item in plan.inputs}
    own: dict[int, frozenset[str]] = {}
    found: set[str] = set()
    for actor in plan.actors:
        for name in _reduced(actor):
            register = plan.register_of[name]
            # Each version is read by one act of this actor, and by nobody else.
            read_once = register.consumers == (actor.id,) and register.rate == actor.acts
            if read_once and name not in given:
                maker = register.producer
                if maker not in own:
                    own[maker] = own_memory(plan.actors[maker])
                found |= own[maker] & {name}
    return frozenset(found)


def own_memory(maker: Actor) -> frozenset[str]:
    """The values that an actor gives away in memory of its own making, shared with nothing else that it gives away."""
    if isinstance(maker, Communicate):
        return frozenset(maker.produces)
    if not isinstance(maker, Compute):
        return frozenset()
    # For a single micro-batch, ops over a step hand on what they get.
    bases = view_bases(maker.nodes, sharing_ops() | OVER_STEP if maker.acts == 1 else None)
    made = {value.name for node in maker.nodes for value in node.makes}
    sources = (node.source for node in maker.nodes if isinstance(node, LocalUpdate))
    leaving = {*maker.produces, *sources} & made
    users = Counter(bases.get(name, name) for name in leaving)
    alone = (name for name in leaving if users[bases.get(name, name)] == 1)
    return frozenset(name for name in alone if bases.get(name, name) in made)


def _reduced(actor: Actor) -> Iterator[str]:
    if isinstance(actor, Communicate):
        each = [one for one in actor.collectives if isinstance(one, Collective)]
        times = Counter(one.input.name for one in each)
        for one in each:
            if one.kind == "all_reduce" and times[one.input.name] == 1:
                yield one.input.name


Kind: TypeAlias = Literal[
    "parameters",
    "buffers",
    "states",
    "batch",
    "constants",
    "gradients",
    "activations",
    "communication",
    "host",
]

KINDS: dict[RegisterKind, Kind] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "state": "states",
    "batch": "batch",
    "constant": "constants",
    "activation": "activations",
    "communication": "communication",
    "gradient": "gradients",
    "host": "host",
    "control": "activations",
}


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at its memory peak.

    `gradients` are what updates read, `communication` what collectives make and the buffers that
    they work with, `activations` everything else that comes and goes.
    """

    parameters: Bytes = NO_BYTES
    buffers: Bytes = NO_BYTES
    states: Bytes = NO_BYTES
    batch: Bytes = NO_BYTES
    constants: Bytes = NO_BYTES
    gradients: Bytes = NO_BYTES
    activations: Bytes = NO_BYTES
    communication: Bytes = NO_BYTES

    @property
    def peak(self) -> Bytes:
        """All kinds together."""
        return Bytes(sum(getattr(self, each.name) for each in fields(self)))

    @staticmethod
    def of(sizes: Mapping[Kind, int]) -> Memory:
        """From sizes by kind; what is on the host does not count."""
        return Memory(**{kind: Bytes(size) for kind, size in sizes.items() if kind != "host"})


# Results that are written over an operand which nobody reads later: of logits, log-probabilities and their gradients.
#
# All three have as many elements as there are samples times classes, which is often the largest tensor of a step. The
# kernels read each element before they write it. So a cross-entropy takes one such tensor where it took two at a time.


SOFTMAX, BACKWARD = "aten._log_softmax.default", "weft.cross_entropy_backward"
# For the ops that may write over an operand, which one it is.
_OVER = {SOFTMAX: 0, BACKWARD: 1}
# Ops whose results are dense, in the order of their dimensions.
_DENSE = frozenset(
    ("aten.mm.default", "aten.addmm.default", "weft.large_mm", "weft.large_addmm", SOFTMAX)
)


def overwritten(calls: Sequence[LocalCall], leaving: Collection[str]) -> dict[int, str]:
    """The operands that calls of a segment may write their results over, by the places of the calls.

    The log-softmax is one of a loss whose backward is joined, which only CPUs have.
    """
    backward = {call.operands[1] for call in calls if call.op == BACKWARD}
    if not backward:
        return {}
    bases = view_bases(calls)
    makers = {value.name: call for call in calls for value in call.makes}
    last = {bases.get(name, name): place for place, call in enumerate(calls) for name in call.reads}
    stay = {bases.get(name, name) for name in leaving}
    found = {}
    for place, call in enumerate(calls):
        if call.op not in _OVER or (call.op == SOFTMAX and call.makes[0].name not in backward):
            continue
        operand = call.operands[_OVER[call.op]]
        base = bases.get(operand, operand)
        dense = base in makers and makers[base].op in _DENSE
        if dense and last[base] == place and base not in stay and _alike(call, operand, makers):
            found[place] = operand
    return found


def with_overwrites(
    bases: Mapping[str, str], calls: Sequence[LocalCall], over: Mapping[int, str]
) -> dict[str, str]:
    """For each value that shares memory, the one that first had it: views, and results written over operands."""
    found = dict(bases)
    for place in sorted(over):
        made, operand = calls[place].makes[0].name, over[place]
        root = found.get(operand, operand)
        found |= {name: root for name, base in found.items() if base == made}
        found[made] = root
    return found


def _alike(call: LocalCall, operand: str, makers: Mapping[str, LocalCall]) -> bool:
    (made,) = call.makes
    (read,) = (value for value in makers[operand].makes if value.name == operand)
    return (made.shape, made.dtype) == (read.shape, read.dtype)
