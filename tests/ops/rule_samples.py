"""Sample calls on small tensors for every registered op, in families."""

from __future__ import annotations

from ops import (
    samples_experts,
    samples_layers,
    samples_math,
    samples_passes,
    samples_tensor,
    samples_time,
)

FAMILIES = [
    *samples_tensor.FAMILIES,
    *samples_layers.FAMILIES,
    *samples_experts.FAMILIES,
    *samples_math.FAMILIES,
    *samples_passes.FAMILIES,
    *samples_time.FAMILIES,
]

# Rules that cannot run here, with the reason.
NOT_RUN = {"aten._fused_rms_norm_backward.default": "runs on CUDA only"}
NOT_RUN |= {
    f"aten._scaled_dot_product_{kernel}{direction}.default": "runs on CUDA only"
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention")
    for direction in ("", "_backward")
} | {
    f"aten._scaled_dot_product_fused_attention_overrideable{direction}.default": "needs a back end"
    for direction in ("", "_backward")
}
# What localizing makes of a call that is cut along space: on windows, not on whole tensors.
NOT_RUN |= {
    f"weft.{op}": "checked in test_windows"
    for op in (
        "avg_pool2d",
        "avg_pool2d_backward",
        "convolution",
        "convolution_backward",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
    )
}
