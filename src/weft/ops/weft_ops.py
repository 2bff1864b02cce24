"""weft's own ops in one table: the properties of each op beside its rule and its kernel.

Rules are in `weft.ops.rules`, kernels in `weft.runtime`, both under the same names; a test holds
them against this table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final


@final
@dataclass(frozen=True, slots=True)
class WeftOp:
    """One of weft's own ops.

    Attributes:
        shares: true if its result may be the first operand, or a view of it.
        over_step: true if it makes one value of all micro-batches of a step.
        launches: kernels that the host launches for a call on a device.
        host: the work of the host that prevents CUDA graphs; "" if there is none.
        plain: true if it is a function of ATen ops that Inductor may compile.
        like: the ATen op that it replaces on some device, with the same arguments.
        urgent: true if the next calls need its reduced result, so that it does not wait for gradients of weights.
        places: positions of arguments that say where a rank's shard begins, and nothing else.
        held: positions of arguments that say besides whether a rank has a value, or zeros in its place: of
            memory, not of time.
    """

    shares: bool = False
    over_step: bool = False
    launches: int = 1
    host: str = ""
    plain: bool = False
    like: str = ""
    urgent: bool = False
    places: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


# Elements of the rows or images that kernels take at a time: 512 KB of float32, which stay in a cache.
ELEMENTS_AT_A_TIME = 2**17
# Elements that are hashed at once where numbers are drawn: some dozen passes over them stay in a core's
# cache. On other devices it is the launches that cost, not the passes.
CPU_CHUNK, DEVICE_CHUNK = 2**17, 2**26

_VIEW = WeftOp(shares=True, launches=0)
_PLAIN_VIEW = WeftOp(shares=True, launches=0, plain=True)
_PLAIN = WeftOp(plain=True)
_COUNTS_ROWS = WeftOp(host="the host reads how many rows there are")
_COUNTS_EXPERTS = WeftOp(host="the host reads how many rows each expert has")
_READS_LENGTHS = WeftOp(host="the host reads how long targets are")
_KERNEL = WeftOp()
_LAST_PLACE = WeftOp(places=(-1,))

WEFT_OPS: dict[str, WeftOp] = {
    # Boxing on one rank.
    "weft.slice": replace(_PLAIN_VIEW, places=(2,)),
    "weft.pad": WeftOp(plain=True, places=(2,)),
    "weft.keep": replace(_PLAIN_VIEW, held=(1,)),
    # Ops that passes put into a graph.
    "weft.hint": _PLAIN_VIEW,
    "weft.take": _KERNEL,  # gone before anything runs: a hint or a `weft.use` takes its place
    "weft.use": _PLAIN_VIEW,
    "weft.after": _VIEW,
    "weft.accumulate": WeftOp(over_step=True),
    "weft.accumulate_mm": WeftOp(over_step=True, like="aten.mm.default"),
    "weft.pack": WeftOp(over_step=True),
    "weft.blank": _KERNEL,
    "weft.square_sum": _PLAIN,
    "weft.nonfinite": _KERNEL,
    "weft.scale": _PLAIN,
    "weft.cast_parts": _KERNEL,
    "weft.cast_whole": _KERNEL,
    "weft.clip_factor": _KERNEL,
    "weft.next_scale": _KERNEL,
    "weft.offload": WeftOp(host="it copies to host memory"),
    "weft.load": WeftOp(host="it copies from host memory"),
    # Ops that capture makes of a user's op.
    "weft.uniform": WeftOp(launches=12, places=(1,)),
    "weft.checked": WeftOp(shares=True, launches=0, host="the host reads its error codes"),
    "weft.required": WeftOp(shares=True, launches=0, host="the host reads whether the check holds"),
    "weft.lstsq": WeftOp(host="its solver works with the host"),
    "weft.ctc_loss": _READS_LENGTHS,
    "weft.ctc_loss_backward": _READS_LENGTHS,
    "weft.lstm": _KERNEL,
    "weft.lstm_backward": _KERNEL,
    "weft.segments": _KERNEL,
    "weft.expert_mm": _COUNTS_EXPERTS,
    "weft.expert_gradient": _COUNTS_EXPERTS,
    "weft.routes": _KERNEL,
    "weft.dispatch": _COUNTS_ROWS,
    "weft.combine": _COUNTS_ROWS,
    # Ops in place of an op that is split.
    "weft.embedding_shard": WeftOp(places=(2,)),
    "weft.embedding_dense_backward_shard": WeftOp(places=(3,)),
    "weft.nll_loss_shard": _LAST_PLACE,
    "weft.nll_loss_backward_shard": _LAST_PLACE,
    "weft.class_scores": _KERNEL,
    "weft.sum_exp": _KERNEL,
    "weft.class_loss": _LAST_PLACE,
    "weft.class_loss_backward": _LAST_PLACE,
    "weft.attention_rows": _KERNEL,
    "weft.attention_rows_backward": _KERNEL,
    "weft.convolution": _KERNEL,
    "weft.convolution_backward": _KERNEL,
    "weft.avg_pool2d": _KERNEL,
    "weft.avg_pool2d_backward": _KERNEL,
    "weft.max_pool2d_with_indices": _KERNEL,
    "weft.max_pool2d_with_indices_backward": _KERNEL,
    "weft.batch_moments": WeftOp(urgent=True),
    "weft.batch_statistics": _KERNEL,
    "weft.batch_norm_sums": WeftOp(urgent=True),
    "weft.batch_norm_gradient": _KERNEL,
    # Ops that a rank runs in place of slower ones on its device.
    "weft.cross_entropy_backward": _KERNEL,
    "weft.batch_norm": WeftOp(plain=True, like="aten._native_batch_norm_legit_functional.default"),
    "weft.batch_norm_backward": WeftOp(plain=True, like="aten.native_batch_norm_backward.default"),
    "weft.large_mm": WeftOp(plain=True, like="aten.mm.default"),
    "weft.large_addmm": WeftOp(plain=True, like="aten.addmm.default"),
}


def ops_that(attribute: str) -> frozenset[str]:
    """The names of the ops of which an attribute is true: `ops_that("urgent")`."""
    return frozenset(name for name, op in WEFT_OPS.items() if getattr(op, attribute))
