"""Pooling, padding and resampling of images and volumes: by batch and channels. Space stays whole.

Pooling that may also be split along space stands in `weft.ops.rules.layers.pooling`.
"""

from __future__ import annotations

from typing import Any

from weft.ops.arguments import slot_specs
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Factors
from weft.ops.rule import aten, resized, rule
from weft.ops.rules.common import FIRST, numbered, of_floats, shape_of


def _columns(call: OpCall) -> Factors:
    """Blocks of columns belong to channels, so that a split of the channels is one of the columns.

    A single channel has nothing to split, though it has columns.
    """
    short = 2 if call.op == "aten.col2im.default" else 3
    before, after = slot_specs(call)[0].shape, shape_of(call.results[0])
    batch = tuple(f"d{i}" for i in range(len(before) - short))
    space = (len(before) - len(batch), len(after) - len(batch))
    channel = WHOLE if 1 in (before[len(batch)], after[len(batch)]) else "c"
    names = tuple((*batch, channel, *(WHOLE,) * (rank - 1)) for rank in space)
    return Factors(names[:1], names[1:])


def _pixels(call: OpCall) -> Factors:
    """Blocks of pixels and groups of channels go together, where the ranks divide the numbers of both."""
    before, after = slot_specs(call)[0].shape, shape_of(call.results[0])
    names = numbered(len(before))
    kept = tuple(
        WHOLE if 1 in (a, b) and a != b else name
        for name, a, b in zip(names, before, after, strict=True)
    )
    return Factors((kept,), (kept,))


MOVES: dict[str, Any] = {"linear": FIRST, "monotone": FIRST}

rule(aten("adaptive_max_pool2d"), "... 1 1 -> ... 1 1, ... 1 1")
rule(aten("adaptive_max_pool2d_backward"), "... 1 1, ... 1 1, ... 1 1 -> ... 1 1", linear=FIRST)
rule(aten("max_pool3d_with_indices adaptive_max_pool3d"), "... 1 1 1 -> ... 1 1 1, ... 1 1 1")
rule(
    aten("max_pool3d_with_indices_backward"),
    "... 1 1 1, ... 1 1 1, _, _, _, _, _, ... 1 1 1 -> ... 1 1 1",
    linear=FIRST,
)
rule(
    aten("adaptive_max_pool3d_backward"),
    "... 1 1 1, ... 1 1 1, ... 1 1 1 -> ... 1 1 1",
    linear=FIRST,
)

rule(aten("avg_pool1d adaptive_avg_pool1d"), "... 1 -> ... 1", linear=of_floats)
rule(aten("_adaptive_avg_pool2d"), "... 1 1 -> ... 1 1", linear=of_floats)
rule(aten("avg_pool3d _adaptive_avg_pool3d"), "... 1 1 1 -> ... 1 1 1", linear=of_floats)
rule(
    aten("_adaptive_avg_pool2d_backward"),
    "... 1 1, ... 1 1 -> ... 1 1",
    linear=FIRST,
)
rule(
    aten("avg_pool3d_backward _adaptive_avg_pool3d_backward"),
    "... 1 1 1, ... 1 1 1 -> ... 1 1 1",
    linear=FIRST,
)

for _dims in (1, 2, 3):
    _space = " 1" * _dims
    rule(
        aten(f"reflection_pad{_dims}d replication_pad{_dims}d"),
        f"...{_space} -> ...{_space}",
        **MOVES,
    )
    rule(
        aten(f"reflection_pad{_dims}d_backward replication_pad{_dims}d_backward"),
        f"...{_space}, ...{_space} -> ...{_space}",
        linear=FIRST,
        ignored=(1,),
    )

for _name in ("nearest1d", "linear1d"):
    rule(aten(f"upsample_{_name}"), "... 1 -> ... 1", linear=of_floats)
    rule(aten(f"upsample_{_name}_backward"), "... 1 -> ... 1", linear=FIRST, adapt=resized(2))
rule(
    aten("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
    "... 1 1 -> ... 1 1",
    linear=of_floats,
)
rule(
    aten("upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward"),
    "... 1 1 -> ... 1 1",
    linear=FIRST,
    adapt=resized(2),
)
rule(aten("pixel_shuffle pixel_unshuffle"), _pixels, **MOVES)
rule(aten("im2col"), _columns, **MOVES)
rule(aten("col2im"), _columns, linear=FIRST)
rule(aten("grid_sampler_2d"), "n c 1 1, n 1 1 1 -> n c 1 1", linear=FIRST)
rule(
    aten("grid_sampler_2d_backward"),
    "n c+ 1 1, n c 1 1, n 1 1 1 -> n c 1 1, n 1 1 1",
    linear=FIRST,
)
