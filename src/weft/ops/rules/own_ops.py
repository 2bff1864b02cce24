"""weft's own ops: those of experts, which multiply rows and send them there and back, and those of passes.

`weft.expert_mm(x[s, k], w[e, k, n], ids[s], offset) -> [s, n]`: row i is `x[i] @ w[ids[i] - offset]`,
zeros where there is no such matrix. Rows are in any order; kernels sort their own. Split rows need
nothing of one another; with split experts each rank makes the rows of its own, and the sum is whole.
`weft.expert_gradient(x[s, k], g[s, n], ids[s], experts, offset) -> [e, k, n]` is the gradient of `w`.
Both take rows in blocks too: with `ids[b, r]`, block b of x[b, r, k] has the experts
[b·e/B, (b+1)·e/B) of its own, counted from the block's first, so that blocks and experts split together.

`weft.segments(offs[e], rows, first) -> [rows]` is the expert of each row where rows are sorted by
experts and `offs` says where those of each end: what torch's grouped product means.

Dispatch and combine are those of GShard (Lepikhin et al. 2020, section 3): rows s of `groups` groups
go to `blocks` blocks of experts, up to `capacity` of each group to each block. `weft.routes(ids[s],
experts, groups, blocks, capacity) -> [s]` is the place of each row in its group's buffer
[blocks · capacity], in each block by expert, -1 for one without an expert; it raises where a group has
more rows for a block.
`weft.dispatch(x[s / each, …], routes[s], groups, blocks, capacity, around, first, each) ->
[b, groups · capacity, …]` lays the rows there, each one `each` times in a row, `around` elsewhere;
`weft.combine(z, routes[s], groups, capacity, first, each) -> [s / each, …]` takes them back, zeros for
those that are not among the blocks from `first`, and adds up each `each` of them, 16 bits in float32. In
between, an exchange from groups to blocks is all-to-all; where rows are whole, it is the sum of what
the ranks combine.
"""

from __future__ import annotations

from math import prod

from weft.layout import Split
from weft.ops.call import OpCall, argument, normal_dim, slot_specs, with_arguments
from weft.ops.cost import tensor_bytes
from weft.ops.factors import WHOLE, Factors, whole_factors
from weft.ops.rule import Cut, rule
from weft.ops.rules.common import EITHER, FIRST, except_dims, no_work, numbered, pointwise, shape_of

EXPERT_MM, EXPERT_GRADIENT, SEGMENTS = "weft.expert_mm", "weft.expert_gradient", "weft.segments"
ROUTES, DISPATCH, COMBINE = "weft.routes", "weft.dispatch", "weft.combine"


def rows_of_expert(rows: int, experts: int) -> int:
    """The rows of one expert that a kernel takes out at a time: twice as many as if all experts had the same."""
    return max(1, -(-2 * rows // max(1, experts)))


def _block(call: OpCall) -> str:
    """The factor of blocks and their experts; a single block cannot be split."""
    return "b" if call.operands[-1].shape[0] > 1 else WHOLE


def _adapt_product(local: OpCall, cut: Cut) -> OpCall:
    if len(cut.whole.operands[-1].shape) == 2:
        return local
    return with_arguments(local, {3: argument(cut.whole, 3) + cut.operand_range(1, 0)[0]})


def _adapt_gradient(local: OpCall, cut: Cut) -> OpCall:
    first, experts = cut.result_range(0)
    blocks = len(cut.whole.operands[-1].shape) == 2
    return with_arguments(local, {3: experts, 4: argument(cut.whole, 4) + (0 if blocks else first)})


def _work(call: OpCall) -> int:
    """Each row meets one matrix."""
    matrices = call.operands[1].shape if call.op == EXPERT_MM else shape_of(call.results[0])
    return 2 * prod(call.operands[-1].shape) * prod(matrices[1:])


def _adapt_segments(local: OpCall, cut: Cut) -> OpCall:
    first, rows = cut.result_range(0)
    return with_arguments(local, {1: rows, 2: argument(cut.whole, 2) + first})


def _adapt_routes(local: OpCall, cut: Cut) -> OpCall:
    split = cut.signature.results[0] == Split(0)
    groups = argument(cut.whole, 2)
    return with_arguments(local, {2: groups // cut.parts if split else groups})


def _rest(call: OpCall, operand: int, before: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(len(call.operands[operand].shape) - before))


def _adapt_dispatch(local: OpCall, cut: Cut) -> OpCall:
    first, blocks = cut.result_range(0)
    groups = argument(cut.whole, 2)
    split = cut.signature.results[0] == Split(1)
    groups = groups // cut.parts if split else groups
    return with_arguments(local, {2: groups, 3: blocks, 6: argument(cut.whole, 6) + first})


def _adapt_combine(local: OpCall, cut: Cut) -> OpCall:
    first, _ = cut.operand_range(0, 0)
    groups = argument(cut.whole, 2)
    split = cut.signature.operands[1] == Split(0)
    groups = groups // cut.parts if split else groups
    return with_arguments(local, {2: groups, 4: argument(cut.whole, 4) + first})


def _moved(call: OpCall) -> int:
    """The bytes that are moved: the result's rows are read and written once; the buffers around them are not read."""
    made = call.results[0]
    return 2 * tensor_bytes(made) if made else 0


def _combined(call: OpCall) -> int:
    """The result is written, and as many rows are read as it adds up and the buffers hold."""
    made = call.results[0]
    rows = tensor_bytes(made) * int(argument(call, 5)) if made else 0
    return min(tensor_bytes(call.operands[0]), rows) + (tensor_bytes(made) if made else 0)


@rule(EXPERT_MM, linear=EITHER, adapt=_adapt_product, flops=_work)
def _product(call: OpCall) -> Factors:
    if len(call.operands[-1].shape) == 2:
        b = _block(call)
        operands = ((b, "r", "k"), (b, "k", "n"), (b, "r"))
        return Factors(operands, ((b, "r", "n"),), contracted=frozenset("k"))
    rows = (("s", "k"), ("e", "k", "n"), ("s",))
    return Factors(rows, (("s", "n"),), contracted=frozenset("ke"))


@rule(EXPERT_GRADIENT, linear=EITHER, adapt=_adapt_gradient, flops=_work)
def _gradient(call: OpCall) -> Factors:
    if len(call.operands[-1].shape) == 2:
        b = _block(call)
        operands = ((b, "r", "k"), (b, "r", "n"), (b, "r"))
        return Factors(operands, ((b, "k", "n"),), contracted=frozenset("r"))
    rows = (("s", "k"), ("s", "n"), ("s",))
    return Factors(rows, (("e", "k", "n"),), contracted=frozenset("s"))


rule(SEGMENTS, "e! -> s", adapt=_adapt_segments)


@rule(ROUTES, adapt=_adapt_routes, flops=no_work)
def _routes(call: OpCall) -> Factors:
    return Factors((("s",),), (("s",),), hidden=(("s", argument(call, 2)),))


@rule(
    DISPATCH,
    # Linear where nothing but zeros stands around the rows.
    linear=lambda call: () if argument(call, 5) else FIRST,
    adapt=_adapt_dispatch,
    flops=no_work,
    traffic=_moved,
)
def _dispatch(call: OpCall) -> Factors:
    rest = _rest(call, 0, 1)
    groups = (("s", argument(call, 2)),)
    return Factors((("s", *rest), ("s",)), (("b", "s", *rest),), hidden=groups)


@rule(COMBINE, linear=FIRST, adapt=_adapt_combine, flops=no_work, traffic=_combined)
def _combine(call: OpCall) -> Factors:
    rest = _rest(call, 0, 2)
    groups = (("s", argument(call, 2)),)
    z = ("b", "s", *rest)
    return Factors((z, ("s",)), (("s", *rest),), contracted=frozenset("b"), hidden=groups)


def _first_alone(call: OpCall) -> Factors:
    """Every dimension of the first operand is a factor; the second has none."""
    names = numbered(len(slot_specs(call)[0].shape))
    return Factors((names, (WHOLE,) * len(slot_specs(call)[1].shape)), (names,))


# The sum of the squares of all elements; whether an element is not a finite number, 0.0 or 1.0. They
# count as no work, so that they look at a gradient where it is: cutting it would save little and
# cost a collective.
rule("weft.square_sum", "...+ -> ", flops=no_work, traffic=no_work)
rule("weft.nonfinite", "...+ -> ", reduction="max", flops=no_work, traffic=no_work)
# A tensor times a number that is a tensor: what becomes of a gradient stays a gradient.
rule("weft.scale", pointwise, linear=FIRST)
# Conversions of what is added up: of each part of a sum, as the user has allowed it; of the whole sum.
rule("weft.cast_parts", pointwise, linear=FIRST, lossy=True)
rule("weft.cast_whole", pointwise)
# Numbers of the step, the same on all ranks.
rule("weft.clip_factor", whole_factors)
rule("weft.next_scale", whole_factors)
# A parameter for one group of its readers, in each micro-batch, in the layout that its text says.
rule("weft.take", pointwise, linear=FIRST, monotone=FIRST, view=True)
# A copy in host memory, and one on the device again that waits for another value; never split again.
rule("weft.offload", whole_factors)
rule("weft.load", whole_factors)
# The first operand, but not before the second is there.
rule(
    "weft.after",
    _first_alone,
    linear=FIRST,
    monotone=FIRST,
    anyhow=(1,),
    view=True,
    traffic=no_work,
)
# The first operand, where the second is true; else the rank raises.
rule("weft.required", _first_alone, linear=FIRST, monotone=FIRST, view=True, traffic=no_work)


def _along(call: OpCall) -> Factors:
    """The dimension is whole: balanced shards of the whole are not those of its parts."""
    rank = len(call.operands[0].shape)
    names = except_dims(rank, {normal_dim(argument(call, 1, "dim"), rank)})
    return Factors((names,), (names,))


# The reduction of a value over all micro-batches; their concatenation along a dimension. Views, so
# that ranks without elements run them as well: what they make is made once a step.
# A sum over micro-batches may come before the sum over ranks.
rule(
    "weft.accumulate",
    pointwise,
    linear=lambda call: FIRST if argument(call, 1, "reduction") == "sum" else (),
    view=True,
)
rule("weft.pack", _along, linear=FIRST, monotone=FIRST, view=True)
# A micro-batch's part of a value of the step (the offset varies).
rule("weft.slice", _along, linear=FIRST, monotone=FIRST, view=True)
# A value of the step as every micro-batch reads it (the second argument varies).
rule("weft.use", pointwise, linear=FIRST, monotone=FIRST, view=True)
