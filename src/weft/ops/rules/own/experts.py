"""Products of rows with the matrices of their experts, and the ways of rows to experts and back.

`weft.expert_mm(x[s, k], w[e, k, n], ids[s], offset) -> [s, n]`: row i is `x[i] @ w[ids[i] - offset]`,
zeros where there is no such matrix. Rows stand in any order; kernels sort their own. Split rows need
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
from weft.ops.arguments import argument, with_arguments
from weft.ops.call import OpCall
from weft.ops.cost import tensor_bytes
from weft.ops.factors import WHOLE, Factors
from weft.ops.rule import Cut, rule
from weft.ops.rules.common import EITHER, FIRST, no_work, shape_of

EXPERT_MM, EXPERT_GRADIENT, SEGMENTS = "weft.expert_mm", "weft.expert_gradient", "weft.segments"
ROUTES, DISPATCH, COMBINE = "weft.routes", "weft.dispatch", "weft.combine"


def rows_of_expert(rows: int, experts: int) -> int:
    """The rows of one expert that a kernel takes out at a time: twice as many as if all experts had the same."""
    return max(1, -(-2 * rows // max(1, experts)))


def _block(call: OpCall) -> str:
    """The factor of blocks and their experts; a single block cannot be split."""
    return "b" if call.operands[-1].shape[0] > 1 else WHOLE


def _product(call: OpCall) -> Factors:
    if len(call.operands[-1].shape) == 2:
        b = _block(call)
        operands = ((b, "r", "k"), (b, "k", "n"), (b, "r"))
        return Factors(operands, ((b, "r", "n"),), contracted=frozenset("k"))
    rows = (("s", "k"), ("e", "k", "n"), ("s",))
    return Factors(rows, (("s", "n"),), contracted=frozenset("ke"))


def _adapt_product(local: OpCall, cut: Cut) -> OpCall:
    if len(cut.whole.operands[-1].shape) == 2:
        return local
    return with_arguments(local, {3: argument(cut.whole, 3) + cut.operand_range(1, 0)[0]})


def _gradient(call: OpCall) -> Factors:
    if len(call.operands[-1].shape) == 2:
        b = _block(call)
        operands = ((b, "r", "k"), (b, "r", "n"), (b, "r"))
        return Factors(operands, ((b, "k", "n"),), contracted=frozenset("r"))
    rows = (("s", "k"), ("s", "n"), ("s",))
    return Factors(rows, (("e", "k", "n"),), contracted=frozenset("s"))


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


def _routes(call: OpCall) -> Factors:
    return Factors((("s",),), (("s",),), hidden=(("s", argument(call, 2)),))


def _adapt_routes(local: OpCall, cut: Cut) -> OpCall:
    split = cut.signature.results[0] == Split(0)
    groups = argument(cut.whole, 2)
    return with_arguments(local, {2: groups // cut.parts if split else groups})


def _rest(call: OpCall, operand: int, before: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(len(call.operands[operand].shape) - before))


def _dispatch(call: OpCall) -> Factors:
    rest = _rest(call, 0, 1)
    groups = (("s", argument(call, 2)),)
    return Factors((("s", *rest), ("s",)), (("b", "s", *rest),), hidden=groups)


def _adapt_dispatch(local: OpCall, cut: Cut) -> OpCall:
    first, blocks = cut.result_range(0)
    groups = argument(cut.whole, 2)
    split = cut.signature.results[0] == Split(1)
    groups = groups // cut.parts if split else groups
    return with_arguments(local, {2: groups, 3: blocks, 6: argument(cut.whole, 6) + first})


def _combine(call: OpCall) -> Factors:
    rest = _rest(call, 0, 2)
    groups = (("s", argument(call, 2)),)
    z = ("b", "s", *rest)
    return Factors((z, ("s",)), (("s", *rest),), contracted=frozenset("b"), hidden=groups)


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


rule(EXPERT_MM, _product, linear=EITHER, adapt=_adapt_product, flops=_work)
rule(EXPERT_GRADIENT, _gradient, linear=EITHER, adapt=_adapt_gradient, flops=_work)
rule(SEGMENTS, "e! -> s", adapt=_adapt_segments)
rule(ROUTES, _routes, adapt=_adapt_routes, flops=no_work)
rule(
    DISPATCH,
    _dispatch,
    # Linear where nothing but zeros stands around the rows.
    linear=lambda call: () if argument(call, 5) else FIRST,
    adapt=_adapt_dispatch,
    flops=no_work,
    traffic=_moved,
)
rule(COMBINE, _combine, linear=FIRST, adapt=_adapt_combine, flops=no_work, traffic=_combined)
