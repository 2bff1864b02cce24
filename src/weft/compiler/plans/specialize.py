"""The kernels that the calls of a rank run as: one list of patterns for each kind of device.

The last pass over a plan, on the rank that runs it: what pays depends on its device, on a CPU on its
instructions. Before: ops as the rules know them. After: those that have the fastest kernels there.
Shapes, registers and actors stay, and so do estimates of time and memory, which are made before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.ir.legal.plans import verify_plan
from weft.ir.nodes import refs
from weft.ir.plan import Actor, Compute, LocalCall, LocalUpdate, RankPlan
from weft.ops.rules.layers.batch_norm import FEW_POSITIONS, MANY_POSITIONS

SUMMED_PRODUCT = "weft.accumulate_mm"
# BLAS adds to sums of these; integers have other kernels, and of the short floats it would add rounded sums.
_FLOATS = frozenset(("float32", "float64"))
# Products with fewer elements are never worth a look at how their operands lie.
_WIDE = 2**14
# Elements from which on the fused forward of BatchNorm is worth being taken apart.
_LARGE = 2**18


@final
@dataclass(frozen=True)
class KernelVariant:
    """An op that runs as another one of the same arguments.

    Attributes:
        op: what stands in the plan.
        runs: what has the kernel.
        pays: true where that is faster for a call.
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
        onednn: true where float32 products are faster in oneDNN than in BLAS.
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
        replace(plan, actors=tuple(_segment(actor, plan, target) for actor in plan.actors))
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


def _segment(actor: Actor, plan: RankPlan, target: Target) -> Actor:
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

    Args:
        nodes: of a segment that acts for each micro-batch.
        leaving: names of the values that it hands on.

    Returns:
        The nodes; and for each old place, and the end, the new one of what stands there or follows.
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
    """True where a product may be large enough for oneDNN; its kernel looks at the operands, too."""
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
    """True where ATen is slow at the statistics of a BatchNorm in training: of large images."""
    made = call.outputs[0]
    many = call.args[5] is True and _positions(call) >= MANY_POSITIONS
    return many and made is not None and math.prod(made.shape) >= _LARGE


def _slow_backward(call: LocalCall) -> bool:
    """True where ATen is slow at the backward of a BatchNorm in training: of tiny images."""
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
