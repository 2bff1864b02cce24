"""The kernels that the calls of a rank run as: one list of patterns for each kind of device.

The last pass over a plan, on the rank that runs it: the best kernels depend on its device, on a CPU on its
instruction set. Before: ops as the rules know them. After: those that have the fastest kernels there.
Shapes, registers and actors stay, and so do estimates of time and memory, which are made before.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.hardware import DefaultDevice
from weft.hardware.durations import Durations
from weft.ir.legal.plans import verify_plan
from weft.ir.nodes import Arg, Ref, refs
from weft.ir.plan import (
    Actor,
    Compute,
    GraphedRun,
    GraphMode,
    LocalCall,
    LocalProgram,
    LocalUpdate,
    RankPlan,
)
from weft.ops import shares_memory
from weft.ops.call import map_argument
from weft.ops.rules.layers import FEW_POSITIONS, MANY_POSITIONS
from weft.ops.weft_ops import WEFT_OPS
from weft.units import Seconds

SUMMED_PRODUCT = "weft.accumulate_mm"
# BLAS adds to sums of these; integers have other kernels, and of the short floats it would add rounded sums.
_FLOATS = frozenset(("float32", "float64"))
# Products with fewer elements are never worth a look at how their operands are laid out.
_WIDE = 2**14
# Elements from which on the fused forward of BatchNorm is worth being decomposed.
_LARGE = 2**18


@final
@dataclass(frozen=True)
class KernelVariant:
    """An op that runs as another op with the same arguments.

    Attributes:
        op: what is in the plan.
        runs: what has the kernel.
        pays: true if that is faster for a call.
    """

    op: str
    runs: str
    pays: Callable[[LocalCall], bool]


@final
@dataclass(frozen=True)
class Target:
    """The facts of a rank's device that decide which kernels run.

    Attributes:
        device_type: "cpu" or "cuda".
        onednn: true if float32 products are faster in oneDNN than in BLAS.
    """

    device_type: str
    onednn: bool = False

    @property
    def variants(self) -> tuple[KernelVariant, ...]:
        """The patterns of this device; of several that fit, the first holds."""
        if self.device_type != "cpu":
            return ()
        return CPU + (ONEDNN if self.onednn else ())


def specialize(plan: RankPlan, target: Target) -> RankPlan:
    """The plan in the ops that run on a device; legal before and after."""
    return verify_plan(
        replace(plan, actors=tuple(_segment(actor, target) for actor in plan.actors))
    )


def with_joined_sums(plan: RankPlan) -> RankPlan:
    """The plan with sums of products in one call where they run so; it is for estimates, and has its parts no more."""
    return replace(
        plan,
        actors=tuple(
            replace(actor, nodes=tuple(join_sums(actor.nodes, actor.produces)[0]), parts=())
            if isinstance(actor, Compute) and actor.acts > 1
            else actor
            for actor in plan.actors
        ),
    )


def variant(call: LocalCall, target: Target) -> LocalCall:
    """A call as it runs on a device."""
    for each in target.variants:
        if each.op == call.op and each.pays(call):
            return replace(call, call=replace(call.call, op=each.runs))
    return call


def _segment(actor: Actor, target: Target) -> Actor:
    if not isinstance(actor, Compute):
        return actor
    nodes = actor.nodes
    places: Sequence[int] = range(len(nodes) + 1)
    if actor.acts > 1:
        nodes, places = join_sums(nodes, actor.produces)
    same = nodes is actor.nodes
    named = {one.op for one in target.variants}
    if any(isinstance(node, LocalCall) and node.op in named for node in nodes):
        same = False
        nodes = tuple([variant(n, target) if isinstance(n, LocalCall) else n for n in nodes])
    if same:
        return actor
    parts = tuple(dict.fromkeys(places[part] for part in actor.parts))
    inside = tuple(part for part in parts if 0 < part < len(nodes))
    return replace(actor, nodes=nodes, parts=inside)


def join_sums(
    nodes: Sequence[LocalCall | LocalUpdate], leaving: Collection[str]
) -> tuple[tuple[LocalCall | LocalUpdate, ...], Sequence[int]]:
    """The nodes with each sum of a product that nothing else reads as one call, in the sum's place.

    The gradient of a weight is `mm` and then `weft.accumulate`. Joined, BLAS adds to the sum itself:
    the product is neither written nor read, and takes no memory of its own.

    Returns:
        The nodes; and for each old place, and the end, the new one of what is there or follows.
    """
    uses = Counter(name for node in nodes for name in node.reads)
    products = {
        node.makes[0].name: node
        for node in nodes
        if isinstance(node, LocalCall) and node.op == "aten.mm.default"
        if node.makes[0].dtype in _FLOATS
    }
    sums = {
        place: products[name]
        for place, node in enumerate(nodes)
        if (name := _summed(node)) in products and uses[name] == 1 and name not in leaving
    }
    gone = {id(product) for product in sums.values()}
    found: list[LocalCall | LocalUpdate] = []
    places = []
    for place, node in enumerate(nodes):
        places.append(len(found))
        product = sums.get(place)
        if product is not None and isinstance(node, LocalCall):
            found.append(node.changed(op=SUMMED_PRODUCT, args=product.args))
        elif id(node) not in gone:
            found.append(node)
    return tuple(found), (*places, len(found))


def _summed(node: LocalCall | LocalUpdate) -> str:
    """The name of the value that a call sums up; "" for all other nodes."""
    if not isinstance(node, LocalCall) or node.op != "weft.accumulate" or node.args[1] != "sum":
        return ""
    (name,) = refs(node.args[0])
    return name


def _is_wide(call: LocalCall) -> bool:
    """True if a product may be large enough for oneDNN; its kernel looks at the operands, too."""
    made = call.outputs[0]
    if made is None or made.dtype != "float32" or call.kwargs:
        return False
    return math.prod(made.shape) >= _WIDE


def _positions(call: LocalCall) -> int:
    """The positions of an image, of a BatchNorm of float32 images; 0 for all others."""
    made = call.outputs[0]
    if made is None or made.dtype != "float32" or len(made.shape) != 4:
        return 0
    return made.shape[2] * made.shape[3]


def _slow_statistics(call: LocalCall) -> bool:
    """True if ATen is slow at the statistics of a BatchNorm in training: of large images."""
    made = call.outputs[0]
    many = call.args[5] is True and _positions(call) >= MANY_POSITIONS
    return many and made is not None and math.prod(made.shape) >= _LARGE


def _slow_backward(call: LocalCall) -> bool:
    """True if ATen is slow at the backward of a BatchNorm in training: of tiny images."""
    return call.args[7] is True and 1 < _positions(call) < FEW_POSITIONS


CPU = (
    KernelVariant(
        "aten._native_batch_norm_legit_functional.default", "weft.batch_norm", _slow_statistics
    ),
    KernelVariant(
        "aten.native_batch_norm_backward.default", "weft.batch_norm_backward", _slow_backward
    ),
)
ONEDNN = (
    KernelVariant("aten.mm.default", "weft.large_mm", _is_wide),
    KernelVariant("aten.addmm.default", "weft.large_addmm", _is_wide),
)


# Find repeated layers in the segments of a rank, and mark where they begin.
#
# Parts that do the same in the same order, such as the layers of a transformer, share one compiled
# kernel: compile time grows with the number of distinct layers.


# Repeats with fewer calls are taken together until they have as many: what a kernel costs by itself
# is about that of a few small ops, and nothing is fused across its border.
FEWEST = 24
# How many later places with an equal call are tried as the beginning of a second copy.
TRIED = 48


def outline(plan: RankPlan, fewest: int = FEWEST) -> RankPlan:
    """The plan with the places in its segments where parts begin that may each be compiled as one kernel."""
    segments = [actor for actor in plan.actors if isinstance(actor, Compute)]
    calls = [node for one in segments for node in one.nodes if isinstance(node, LocalCall)]
    # Calls are known by identity: equal ones are in many places.
    begins = {id(calls[place]) for place in repeats(calls, fewest)}
    actors = tuple(
        replace(
            actor,
            parts=tuple([n for n, node in enumerate(actor.nodes) if n and id(node) in begins]),
        )
        if isinstance(actor, Compute)
        else actor
        for actor in plan.actors
    )
    return replace(plan, actors=actors)


def repeats(calls: Sequence[LocalCall], fewest: int = FEWEST) -> list[int]:
    """The places before which to cut, so that equal stretches of calls become equal parts.

    Args:
        fewest: the calls of a part, at least, where repeats are long enough.

    Returns:
        Increasing places inside of the list, where a repeat begins or ends.
    """
    numbers: dict[Hashable, int] = {}
    # The facts that two calls have in common whatever they read: op, constants, shapes and dtypes of results.
    facts = (
        (
            call.op,
            _nameless(call.args),
            _nameless(call.kwargs),
            tuple(value and (value.shape, value.dtype) for value in call.outputs),
        )
        for call in calls
    )
    marks = [numbers.setdefault(each, len(numbers)) for each in facts]
    later: defaultdict[int, list[int]] = defaultdict(list)
    for place, mark in enumerate(marks):
        later[mark].append(place)
    cuts: list[int] = []
    place = 0
    while place < len(marks):
        period, copies = _repeat(marks, place, later[marks[place]])
        if period * copies < 2 * fewest:
            place += 1
            continue
        together = min(copies, -(-fewest // period))
        end = place + period * copies
        cuts += [*range(place, end, period * together), end]
        place = end
    return [cut for cut in dict.fromkeys(cuts) if 0 < cut < len(calls)]


def _repeat(marks: Sequence[int], place: int, equal: Sequence[int]) -> tuple[int, int]:
    """The (period, copies) of the longest stretch from `place` on that repeats; (1, 1) without one.

    Args:
        place: where it begins.
        equal: all places of the mark at `place`, increasing.
    """
    best = (1, 1)
    tried = [other - place for other in equal if other > place][:TRIED]
    for period in tried:
        if best[1] > 1 and (period % best[0] == 0 or 2 * period > len(marks) - place):
            continue
        end = place
        while end + period < len(marks) and marks[end] == marks[end + period]:
            end += 1
        copies = 1 + (end - place) // period
        if copies > 1 and period * copies > best[0] * best[1]:
            best = (period, copies)
    return best


def _nameless(arg: Arg) -> Hashable:
    return _typed(map_argument(lambda leaf: Ref if isinstance(leaf, Ref) else leaf, arg))


def _typed(arg: object) -> Hashable:
    """An argument that equals no other of another type: 1, 1.0 and True differ."""
    return tuple(map(_typed, arg)) if isinstance(arg, tuple) else (type(arg), arg)


# The segments that are captured as CUDA graphs, decided from the plan alone.
#
# A graph puts all calls of a segment on the device with one launch. It pays where the host needs
# longer to launch a step than the device to run it (docs/decisions/cuda-graphs.md).


# A segment of fewer launches gains nothing: replaying is a launch, and so is copying what goes in.
FEWEST_LAUNCHES = 4
# No kernel takes less of the device.
SHORTEST = Seconds(2e-6)


def with_cuda_graphs(
    plan: RankPlan,
    program: LocalProgram,
    device: DefaultDevice,
    mode: GraphMode,
    obstacle: Callable[[str], str | None],
) -> tuple[RankPlan, GraphedRun]:
    """Decide for a rank.

    Args:
        device: estimates, with the seconds of a launch as `start`.
        obstacle: says of an op why it cannot be captured; None when it can.

    Returns:
        The plan with marks on what is replayed, its updates never, and how that was found.
    """
    segments = [actor for actor in plan.actors if isinstance(actor, Compute)]
    launches = {each.id: segment_launches(each) * each.acts for each in segments}
    # Views take no time of the device.
    bare = [replace(each, nodes=tuple(filter(_kernels, each.nodes))) for each in segments]
    seconds = Durations(replace(device, start=SHORTEST), ()).of(program, bare)
    busy = Seconds(sum(one * each.acts for one, each in zip(seconds, segments, strict=True)))
    host = Seconds(device.start * sum(launches.values()))
    reasons: dict[int, str] = {}
    slow = "the device takes longer than the host" if mode == "auto" and busy > host else None
    off = "switched off" if mode == "never" else slow
    for each in segments:
        ops = (node.op for node in each.nodes if isinstance(node, LocalCall))
        why = off or next(filter(None, map(obstacle, ops)), None)
        if why is None and launches[each.id] < FEWEST_LAUNCHES * each.acts:
            why = "few launches"
        if why is not None:
            reasons[each.id] = why
    chosen = frozenset(each.id for each in segments if each.id not in reasons)
    saved = sum(launches[each.id] - each.acts for each in segments if each.id in chosen)
    total = sum(launches.values())
    marked = [
        replace(actor, replayed=True)
        if isinstance(actor, Compute) and actor.id in chosen
        else actor
        for actor in plan.actors
    ]
    found = GraphedRun(reasons, total, saved, Seconds(host), Seconds(busy))
    return replace(plan, actors=tuple(marked)), found


def segment_launches(segment: Compute) -> int:
    """The number of launches by the host for the calls of one act: views are none; updates are left out."""
    return sum(_kernels(node) for node in segment.nodes if isinstance(node, LocalCall))


def _kernels(node: LocalCall | LocalUpdate) -> int:
    if isinstance(node, LocalUpdate):
        return 1
    own = WEFT_OPS.get(node.op)
    return int(not shares_memory(node.op)) if own is None else own.launches
