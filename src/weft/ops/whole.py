"""Ops without a rule of their own that run whole: every operand is gathered, every rank computes the whole result.

That is right for any ATen op that is a function: its results depend on the values of its operands
alone, their shapes not on values. What is not (random draws, results whose shape depends on data,
writes in place, meanings that depend on strides) stands here by name, because rules do not know
torch; a test holds the names against its schemas.
"""

from __future__ import annotations

NAMESPACES = ("aten", "prims")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RANDOM = _names(
    """
    _cudnn_attention_backward _cudnn_attention_forward _cudnn_init_dropout_state _cudnn_rnn
    _efficient_attention_forward _flash_attention_forward _fused_dropout _fused_sdp_choice _lstm_mps
    _nested_tensor_softmax_with_shape _sample_dirichlet _scaled_dot_product_attention_math
    _scaled_dot_product_attention_math_for_mps _standard_gamma _triton_scaled_dot_attention alpha_dropout
    bernoulli binomial cauchy dropout exponential feature_alpha_dropout feature_dropout geometric gru log_normal
    lstm miopen_rnn multinomial native_dropout normal normal_functional poisson rand rand_like randint
    randint_like randn randn_like random randperm rnn_relu rnn_tanh rrelu rrelu_with_noise
    rrelu_with_noise_functional scaled_dot_product_attention uniform inductor_random
    """
)
_DATA_DEPENDENT = _names(
    """
    _local_scalar_dense _unique _unique2 allclose argwhere bincount equal index is_nonzero item linalg_lstsq
    masked_select nonzero one_hot repeat_interleave unique_consecutive unique_dim unique_dim_consecutive
    """
)
_STRIDED = _names(
    """
    as_strided as_strided_copy as_strided_scatter _reshape_alias resize resize_as set
    """
)
_WRITING = _names(
    """
    __iand__ __ilshift__ __ior__ __irshift__ __ixor__ _batch_norm_with_update _cummax_helper _cummin_helper
    _flash_attention_forward_no_dropout_inplace _fused_moving_avg_obs_fq_helper _native_batch_norm_legit
    fused_moving_avg_obs_fake_quant record_stream retain_grad set_data copy_to
    """
)
_OUT_OVERLOADS = _names(
    """
    a eigenvalues eigvals grad_input inverse dim_max dim_min dim_values output result sign values values_stable
    L OutScalar_Other OutScalar_Self OutTensor Q U X
    """
)
_UNSAFE = _RANDOM | _DATA_DEPENDENT | _STRIDED | _WRITING


def runs_whole(op: str) -> bool:
    """True where `op`, such as "aten.linalg_qr.default", may run whole without a rule that says so."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    writes = name.endswith("_") and not name.endswith("__")
    writes = writes or "out" in overload.split("_") or overload in _OUT_OVERLOADS
    fused = name.startswith("_scaled_dot_product_")  # draws inside when it drops out
    return namespace in NAMESPACES and name not in _UNSAFE and not writes and not fused
