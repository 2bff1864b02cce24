"""The rules of a legal plan: one table, checked where a plan is made and again where it is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from weft.errors import InternalError
from weft.ir.alias import copied_results, overwritable
from weft.ir.nodes import OVER_STEP
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Communicator,
    Compute,
    Exchange,
    Hold,
    LocalCall,
    LocalNode,
    LocalUpdate,
    LocalValue,
    Piece,
    RankPlan,
    Transfer,
)
from weft.layout import Region, region_shape, region_size


def rates_fit(plan: RankPlan) -> Iterator[str]:
    """Acts and rates are 1 or the micro-batches; no register is faster than an actor at it."""
    legal = (1, plan.micro_batches)
    for actor in plan.actors:
        if actor.acts not in legal:
            yield f"actor {actor.id} acts {actor.acts} times in {legal[1]} micro-batches"
    for register in plan.registers:
        name, rate = register.value.name, register.rate
        if rate not in legal:
            yield f"{name} has {rate} versions in {legal[1]} micro-batches"
        for id in (register.producer, *register.consumers):
            if rate > plan.actors[id].acts:
                yield f"actor {id} acts {plan.actors[id].acts} times, {name} has {rate} versions"


def versions_complete(plan: RankPlan) -> Iterator[str]:
    """A value that a step's acts make together is accumulated or packed; they do not read it."""
    once = {r.value.name for r in plan.registers if r.rate == 1 and r.kind != "control"}
    for actor in plan.actors if plan.micro_batches > 1 else ():
        calls = list(_calls(actor))
        over = {name for call in calls if call.op in OVER_STEP for name in _made(call)}
        for name in sorted(over - once):
            yield f"actor {actor.id} makes {name} over a step, but hands it on in each act"
        read = {name for call in calls for name in call.reads} if over else set()
        for name in sorted(over & read):
            yield f"actor {actor.id} reads {name} before the step has made it"
        for name in sorted(once.intersection(actor.produces) - over) if actor.acts > 1 else ():
            yield f"actor {actor.id} makes {name} in each act, but hands it on once a step"


def varying_arguments_complete(plan: RankPlan) -> Iterator[str]:
    """An argument that varies has a value for each act of its actor."""
    for actor in plan.actors:
        for call in _calls(actor):
            for varying in call.varyings:
                if len(varying.values) != actor.acts:
                    yield f"actor {actor.id} acts {actor.acts} times, but {call.op} has {varying}"


def control_registers_empty(plan: RankPlan) -> Iterator[str]:
    """A control register has no tensor; only such a one is waited for or signalled."""
    control = {r.value.name: r for r in plan.registers if r.kind == "control"}
    for name, register in control.items():
        if (register.value.shape, register.value.dtype) != ((0,), "bool"):
            yield f"{name} is a control register, but not bool[0]"
    for actor in plan.actors:
        nodes = _nodes(actor) if control else ()
        touched = {name for node in nodes for name in (*node.reads, *_made(node))}
        for name in sorted(touched & control.keys()):
            yield f"actor {actor.id} uses the control register {name} as a tensor"
        named = (*actor.waits, *actor.signals) if isinstance(actor, Communicate) else ()
        for name in sorted(set(named) - control.keys()):
            yield f"actor {actor.id} waits for or signals {name}, which is not a control register"


def orders_complete(plan: RankPlan) -> Iterator[str]:
    """A queue has one order at most: every act once, micro-batches of an actor ascending."""
    queues = [order.queue for order in plan.orders]
    for queue in sorted({queue for queue in queues if queues.count(queue) > 1}):
        yield f"{queue} has two orders"
    for order in plan.orders:
        actors = [a for a in plan.actors if a.queue == order.queue and not isinstance(a, Hold)]
        expected = [(actor.id, micro) for actor in actors for micro in range(actor.acts)]
        # Stable: what stays are the micro-batches of each actor in the order's own order.
        if sorted(order.acts, key=lambda act: act[0]) != expected:
            yield f"the order of {order.queue} is not one of its actors' micro-batches"


def _nodes(actor: Actor) -> Sequence[LocalNode]:
    match actor:
        case Compute(nodes=nodes):
            return nodes
        case Communicate(collectives=collectives):
            return collectives
    return ()


def _calls(actor: Actor) -> Iterator[LocalCall]:
    return (node for node in _nodes(actor) if isinstance(node, LocalCall))


def _made(node: LocalNode) -> set[str]:
    return {value.name for value in node.makes}


def in_place_is_last(plan: RankPlan) -> Iterator[str]:
    """An all-reduce writes over its input only where nobody else reads that memory, or will."""
    in_place = [
        (actor, each)
        for actor in plan.actors
        if isinstance(actor, Communicate)
        for each in actor.collectives
        if isinstance(each, Collective) and each.in_place
    ]
    allowed = overwritable(plan) if in_place else ()
    for actor, each in in_place:
        name = each.input.name
        if each.kind != "all_reduce":
            yield f"actor {actor.id} runs {each.kind} of {name} in place"
        elif name not in allowed:
            others = [id for id in plan.register_of[name].consumers if id != actor.id]
            who = f"actors {others} read it, too" if others else "others hold its memory"
            yield f"actor {actor.id} reduces {name} in place, but {who}"


def copies_complete(plan: RankPlan) -> Iterator[str]:
    """A segment copies the values of overwritten variables that it hands on, and nothing that stays inside."""
    for actor in plan.actors:
        if isinstance(actor, Compute):
            for name in sorted({*copied_results(plan, actor)} - {*actor.copies}):
                yield f"actor {actor.id} hands on {name} in memory of a variable that is overwritten"
            sources = (node.source for node in actor.nodes if isinstance(node, LocalUpdate))
            for name in sorted({*actor.copies}.difference(actor.produces, sources)):
                yield f"actor {actor.id} copies {name}, but does not hand it on"


def parts_inside(plan: RankPlan) -> Iterator[str]:
    """Parts of a segment begin at increasing places of its nodes."""
    for actor in plan.actors:
        if isinstance(actor, Compute) and actor.parts:
            inside = range(1, len(actor.nodes))
            if any(place not in inside for place in actor.parts):
                yield f"a part of actor {actor.id} begins outside of its {len(actor.nodes)} nodes"
            if list(actor.parts) != sorted(set(actor.parts)):
                yield f"the parts of actor {actor.id} are not in order: {list(actor.parts)}"


# A rule yields what is wrong for each place where it does not hold.
PlanRule = Callable[[RankPlan], Iterator[str]]


def verify_plan(plan: RankPlan, rules: Sequence[PlanRule] | None = None) -> RankPlan:
    """Return `plan` when it is legal.

    Args:
        rules: those that it may break; `COPY_RULES` for a legal plan that was given other copies and
            orders.

    Raises:
        InternalError: naming the rule and the place, since only a pass of weft can have made the
            plan.
    """
    for rule in PLAN_RULES if rules is None else rules:
        for problem in rule(plan):
            raise InternalError(
                f"the plan of rank {plan.rank} breaks the rule {rule.__name__}: {problem}"
            )
    return plan


def verify_communicators(plan: RankPlan, communicators: tuple[Communicator, ...]) -> None:
    """Check that the rank belongs to every communicator it uses, and that pieces add up.

    Raises:
        InternalError: naming the actor.
    """
    known = {communicator.id: communicator for communicator in communicators}
    for actor in plan.actors:
        for node in actor.collectives if isinstance(actor, Communicate) else ():
            group = known.get(node.communicator)
            if group is None or plan.rank not in group.ranks or actor.queue != group.queue:
                raise InternalError(
                    f"actor {actor.id} of rank {plan.rank} uses communicator {node.communicator} "
                    f"on queue {actor.queue}, but is not a member of it"
                )
            if not _pieces_add_up(node, group.ranks.index(plan.rank), len(group.ranks)):
                raise InternalError(
                    f"actor {actor.id} of rank {plan.rank}: the pieces of {node.kind} "
                    f"{', '.join(sorted(node.reads))} do not fit its shapes"
                )


def actors_numbered(plan: RankPlan) -> Iterator[str]:
    """Actor number `i` has id `i`."""
    for index, actor in enumerate(plan.actors):
        if actor.id != index:
            yield f"actor number {index} has id {actor.id}"


def registers_unique(plan: RankPlan) -> Iterator[str]:
    """No two registers hold values of the same name."""
    seen: set[str] = set()
    for register in plan.registers:
        if register.value.name in seen:
            yield f"{register.value.name} has two registers"
        seen.add(register.value.name)


def registers_know_their_actors(plan: RankPlan) -> Iterator[str]:
    """Actors and registers name each other as producer and consumers."""
    reads = {(actor.id, name) for actor in plan.actors for name in actor.consumes}
    read_by = {(id, r.value.name) for r in plan.registers for id in r.consumers}
    writes = {(actor.id, name) for actor in plan.actors for name in actor.produces}
    written_by = {(register.producer, register.value.name) for register in plan.registers}
    for verb, found, expected in (("reads", reads, read_by), ("writes", writes, written_by)):
        for id, name in sorted(found ^ expected):
            side = "its register" if (id, name) in expected else "the actor"
            yield f"that actor {id} {verb} {name} only {side} says"


def nobody_reads_what_it_writes(plan: RankPlan) -> Iterator[str]:
    """An actor that updates a variable is its producer, not one of its consumers."""
    for actor in plan.actors:
        for name in sorted(set(actor.consumes) & set(actor.produces)):
            yield f"actor {actor.id} both reads and writes {name}"


def credits_given(plan: RankPlan) -> Iterator[str]:
    """Every register has a credit."""
    for register in plan.registers:
        if register.credits < 1:
            yield f"register {register.value.name} has no credit"


def held_registers_full(plan: RankPlan) -> Iterator[str]:
    """A register that nobody rewrites must be full from the start."""
    for register in plan.registers:
        if isinstance(plan.actors[register.producer], Hold) and not register.full:
            yield f"{register.value.name} is held, but empty at the start"


def segments_read_what_is_there(plan: RankPlan) -> Iterator[str]:
    """A node of a segment reads registers of its actor, or values made before it in the segment."""
    for actor in plan.actors:
        if not isinstance(actor, Compute):
            continue
        there = {*actor.consumes, *_updated(actor)}
        for node in actor.nodes:
            missing = node.reads - there
            if missing:
                yield f"actor {actor.id} reads {', '.join(sorted(missing))} too early"
            there.update(value.name for value in node.makes)


def _updated(actor: Compute) -> set[str]:
    updates = (node for node in actor.nodes if isinstance(node, LocalUpdate))
    return {name for update in updates for name in (update.target, *update.states)}


def _pieces_add_up(node: Exchange, index: int, ranks: int) -> bool:
    if isinstance(node, Transfer):
        # Pieces are inside their tensors, those that arrive fill the output, and what stays here leaves from here.
        here = [
            [region for peer, region in side if peer == index]
            for side in (node.sends, node.receives)
        ]
        filled = sum(region_size(region) for _, region in node.receives)
        return (
            _inside(node.sends, node.input, ranks)
            and _inside(node.receives, node.output, ranks)
            and [region_shape(region) for region in here[0]] == [region_shape(r) for r in here[1]]
            and filled == (0 if node.output is None else math.prod(node.output.shape))
        )
    return _collective_adds_up(node, index, ranks)


def _inside(pieces: Sequence[Piece], value: LocalValue | None, ranks: int) -> bool:
    if value is None:
        return not pieces
    peers = [peer for peer, _ in pieces]
    return (
        len(set(peers)) == len(peers)
        and all(0 <= peer < ranks for peer in peers)
        and all(_fits(region, value.shape) for _, region in pieces)
    )


def _fits(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region) == len(shape) and all(
        at >= 0 and length > 0 and at + length <= size
        for (at, length), size in zip(region, shape, strict=True)
    )


def _collective_adds_up(node: Collective, index: int, ranks: int) -> bool:
    before, after = node.input.shape, node.output.shape
    if node.kind == "all_reduce":
        return before == after
    if len(node.sizes) != ranks:
        return False
    if node.kind == "reduce_scatter":
        return _with(before, node.dim, node.sizes[index]) == after and (
            before[node.dim] == sum(node.sizes)
        )
    mine = before[node.dim] == node.sizes[index]
    whole = _with(before, node.dim, sum(node.sizes))
    if node.kind == "all_gather":
        return mine and whole == after
    pieces = node.split_sizes
    return (
        mine
        and len(pieces) == ranks
        and before[node.split_dim] == sum(pieces)
        and (math.prod(_with(whole, node.split_dim, pieces[index])) == math.prod(after))
    )


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


PLAN_RULES: tuple[PlanRule, ...] = (
    actors_numbered,
    registers_unique,
    registers_know_their_actors,
    nobody_reads_what_it_writes,
    credits_given,
    held_registers_full,
    segments_read_what_is_there,
    rates_fit,
    versions_complete,
    varying_arguments_complete,
    control_registers_empty,
    orders_complete,
    in_place_is_last,
    copies_complete,
    parts_inside,
)
# Rules of slots and orders.
COPY_RULES: tuple[PlanRule, ...] = (credits_given, orders_complete)
