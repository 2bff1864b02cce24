"""Values that share memory, read off local nodes: one walk, by what the rule of each op says.

An op whose rule says that it shares may return its first operand or a view of it; every other op
makes memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

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
from weft.ops.rule import sharing_ops


def view_bases(
    nodes: Iterable[LocalNode], sharing: Collection[str] | None = None
) -> dict[str, str]:
    """For each result of a call that may share memory with an operand: the value that first had that memory.

    Args:
        nodes: in an order in which they run.
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
    # Of a single micro-batch, ops over a step hand on what they get.
    bases = view_bases(maker.nodes, sharing_ops() | OVER_STEP if maker.acts == 1 else None)
    made = {value.name for node in maker.nodes for value in node.makes}
    sources = (node.source for node in maker.nodes if isinstance(node, LocalUpdate))
    leaving = {*maker.produces, *sources} & made
    users = Counter(bases.get(name, name) for name in leaving)
    alone = (name for name in leaving if users[bases.get(name, name)] == 1)
    return frozenset(name for name in alone if bases.get(name, name) in made)


def _reduced(actor: Actor) -> Iterator[str]:
    """The inputs of all-reduces that are read once."""
    if isinstance(actor, Communicate):
        each = [one for one in actor.collectives if isinstance(one, Collective)]
        times = Counter(one.input.name for one in each)
        for one in each:
            if one.kind == "all_reduce" and times[one.input.name] == 1:
                yield one.input.name
