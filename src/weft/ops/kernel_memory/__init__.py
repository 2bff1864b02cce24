"""The memory that kernels take beside their results, and that results take beside their elements.

Of one call on one rank, by its shapes: what stands in `weft.runtime.kernels`, and the ATen kernels of
which a dispatch mode sees more than the results. What a kernel of torch takes for itself, nobody sees.
A test runs every op and holds it against these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

from weft.ops.call import OpCall
from weft.ops.kernel_memory import experts, layers, losses, windows
from weft.ops.rule import KNOWN_CALLS
from weft.units import NO_BYTES, Bytes

_BESIDE = {**experts.BESIDE, **layers.BESIDE, **losses.BESIDE, **windows.BESIDE}
_PADDING: dict[str, Callable[[OpCall], tuple[int, ...]]] = {**layers.PADDING, **losses.PADDING}
# The ops of which calls take more than the elements of their results.
TAKING = frozenset((*_BESIDE, *_PADDING))


# The ATen ops whose operands are laid in order where they run (`weft.runtime.kernels.dense_operands`).
LAYING = frozenset(
    f"aten.{name}"
    for name in (
        *("_embedding_bag.default", "_embedding_bag_backward.default"),
        *("_embedding_bag_dense_backward.default", "_embedding_bag_forward_only.default"),
        "_embedding_bag_per_sample_weights_backward.default",
        # Of a contiguous matrix they factorize the transpose, which their backward knows; see
        # `weft.capture.ops.decompositions`.
        *("_linalg_det.default", "_linalg_slogdet.default"),
        *("_pdist_backward.default", "_pdist_forward.default"),
        *("_weight_norm_interface.default", "_weight_norm_interface_backward.default"),
        *("adaptive_max_pool3d_backward.default", "fractional_max_pool2d_backward.default"),
        *("fractional_max_pool3d_backward.default", "native_layer_norm_backward.default"),
        *("nll_loss2d_backward.default", "nanmedian.dim", "view_as_complex.default"),
        *("native_group_norm.default", "native_group_norm_backward.default"),
        *("max_pool3d_with_indices.default", "max_pool3d_with_indices_backward.default"),
    )
)


@lru_cache(maxsize=KNOWN_CALLS)
def beside(call: OpCall) -> Bytes:
    """The most that a call takes at a time beside its results, gone when it ends."""
    formula = _BESIDE.get(call.op)
    return NO_BYTES if formula is None else Bytes(max(0, formula(call)))


@lru_cache(maxsize=KNOWN_CALLS)
def padding(call: OpCall) -> tuple[Bytes, ...]:
    """For each result of a call, what its memory has beyond its elements, for as long as it is there."""
    formula = _PADDING.get(call.op)
    found = formula(call) if formula else ()
    return tuple(Bytes(found[i] if i < len(found) else 0) for i in range(len(call.results)))


def slice_copies(shape: Sequence[int], dim: int, length: int) -> bool:
    """True where `weft.slice` makes a copy: a block of `length` along `dim` lies in pieces."""
    return length < shape[dim] and prod(shape[:dim]) > 1
