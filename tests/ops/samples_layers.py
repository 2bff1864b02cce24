"""Sample calls of the ops of layers and losses, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops.draw import GENERATOR, aten, f, i
from tools.oracles.meanings import attention_rows, lstm
from tools.oracles.rules import TorchCall, torch_call
from weft.runtime.kernels.layer_ops import batch_moments, batch_norm_sums, batch_statistics
from weft.runtime.kernels.loss_ops import ctc_loss

A = torch.ops.aten


def normalizations() -> Iterator[TorchCall]:
    x, w, bias, g = f(4, 5, 6), f(6), f(6), f(4, 5, 6)
    for weight, shift in ((w, bias), (None, None), (w, None)):
        yield aten("native_layer_norm", x, (6,), weight, shift, 1e-5)
        _, mean, rstd = A.native_layer_norm.default(x, (6,), weight, shift, 1e-5)
        mask = (True, weight is not None, shift is not None)
        yield aten("native_layer_norm_backward", g, x, (6,), mean, rstd, weight, shift, mask)
    yield aten("native_layer_norm", x, (5, 6), None, None, 1e-5)
    yield aten("_fused_rms_norm", x, (6,), w, 1e-5)

    yield from _group_norm(f(4, 12, 5), 4)
    yield from _group_norm(f(5, 5, 2, 3), 5)
    yield from _group_norm(f(1, 4, 3, 2), 2)
    yield from _batch_norm(5)
    yield from _batch_norm(1)


def _group_norm(x: torch.Tensor, groups: int) -> Iterator[TorchCall]:
    n, c, *space = x.shape
    size = torch.Size(space).numel()
    w, bias, g = f(c), f(c), f(*x.shape)
    yield aten("native_group_norm", x, w, bias, n, c, size, groups, 1e-5)
    yield aten("native_group_norm", x, None, None, n, c, size, groups, 1e-5)
    _, mean, rstd = A.native_group_norm.default(x, w, bias, n, c, size, groups, 1e-5)
    mask = (True, True, True)
    yield aten("native_group_norm_backward", g, x, mean, rstd, w, n, c, size, groups, mask)


def _batch_norm(n: int) -> Iterator[TorchCall]:
    x, w, bias, g, mean = f(n, 4, 4, 5), f(4), f(4), f(n, 4, 4, 5), f(4)
    var = f(4).exp()
    yield aten("_native_batch_norm_legit_no_training", x, w, bias, mean, var, 0.1, 1e-5)
    for training in (True, False):
        yield aten("native_batch_norm", x, w, bias, mean.clone(), var.clone(), training, 0.0, 1e-5)
        yield aten(
            "_native_batch_norm_legit_functional", x, w, bias, mean, var, training, 0.1, 1e-5
        )
        saved = A.native_batch_norm.default(x, w, bias, mean, var, training, 0.0, 1e-5)[1:]
        mask = (True, True, True)
        yield aten("native_batch_norm_backward", g, x, w, mean, var, *saved, training, 1e-5, mask)
    yield from _split_batch_norm(x, w, g, (mean, var))


def _split_batch_norm(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, running: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[TorchCall]:
    """What a BatchNorm is taken apart into where its batch is split."""
    yield torch_call("weft.batch_moments", x)
    moments, count = batch_moments(x), x.numel() // x.shape[1]
    settings = (count, 0.1, 1e-5, x.dtype)
    yield torch_call("weft.batch_statistics", moments, *running, *settings)
    yield torch_call("weft.batch_statistics", moments, None, None, *settings)
    _, mean, rstd, *_ = batch_statistics(moments, None, None, *settings)
    assert mean is not None
    assert rstd is not None
    yield torch_call("weft.batch_norm_sums", g, x, mean, rstd)
    sums = batch_norm_sums(g, x, mean, rstd)
    for weight in (w, None):
        yield torch_call("weft.batch_norm_gradient", g, x, weight, mean, rstd, sums, count)


def losses() -> Iterator[TorchCall]:
    x, t, g = f(5, 4), f(5, 4), f(5, 4)
    p, q = x.sigmoid(), t.sigmoid()
    for reduction in (0, 1, 2):
        gradient = g if reduction == 0 else f()
        yield aten("mse_loss", x, t, reduction)
        yield aten("mse_loss_backward", gradient, x, t, reduction)
        yield aten("soft_margin_loss", x, t.sign(), reduction)
        yield aten("soft_margin_loss_backward", gradient, x, t.sign(), reduction)
        for name in ("smooth_l1_loss", "huber_loss"):
            yield aten(name, x, t, reduction, 0.7)
            yield aten(f"{name}_backward", gradient, x, t, reduction, 0.7)
        yield aten("binary_cross_entropy", p, q, f(4).exp(), reduction)
        yield aten("binary_cross_entropy", p, q, None, reduction)
        yield aten("binary_cross_entropy_with_logits", x, q, None, f(4).exp(), reduction)
        yield aten("binary_cross_entropy_backward", gradient, p, q, None, reduction)
        yield from _margin(f(5, 4), reduction)
        yield from _nll("nll_loss", f(5, 4), i(4, 5), reduction)
        yield from _nll("nll_loss2d", f(5, 4, 6, 4), i(4, 5, 6, 4), reduction)


def temporal_classification() -> Iterator[TorchCall]:
    scores, targets = f(6, 5, 4).log_softmax(-1), i(3, 5, 3) + 1
    lengths = torch.tensor([6, 5, 6, 4, 6]), torch.tensor([2, 1, 0, 3, 2])
    for blank in (0, 3):
        given = (scores, targets - blank // 3, *lengths)
        losses, log_alpha = ctc_loss(*given, blank, False)
        yield torch_call("weft.ctc_loss", *given, blank, False)
        saved = (losses, log_alpha, blank, True)
        yield torch_call("weft.ctc_loss_backward", f(5), *given, *saved)


def _margin(scores: torch.Tensor, reduction: int) -> Iterator[TorchCall]:
    gradient = f(len(scores)) if reduction == 0 else f()
    rest = (i(4, 5), 1, 0.7, f(4).exp(), reduction)
    yield aten("multi_margin_loss", scores, *rest)
    yield aten("multi_margin_loss_backward", gradient, scores, *rest)
    labels = torch.tensor(
        [[0, 3, -1, 1], [2, -1, 0, 0], [3, 2, 1, 0], [-1, 0, 0, 0], [1, 2, -1, -1]]
    )
    yield aten("multilabel_margin_loss_forward", scores, labels, reduction)
    _, seen = A.multilabel_margin_loss_forward.default(scores, labels, reduction)
    yield aten("multilabel_margin_loss_backward", gradient, scores, labels, reduction, seen)


def _nll(
    name: str, scores: torch.Tensor, target: torch.Tensor, reduction: int
) -> Iterator[TorchCall]:
    target.view(-1)[0] = -100
    for weight in (None, f(4).exp()):
        args = (scores, target, weight, reduction, -100)
        yield aten(f"{name}_forward", *args)
        output, total = getattr(A, f"{name}_forward").default(*args)
        yield aten(f"{name}_backward", torch.ones_like(output), *args, total)
        if reduction != 1:
            yield torch_call("weft.nll_loss_shard", *args, 2)
            yield torch_call(
                "weft.nll_loss_backward_shard", torch.ones_like(output), *args, total, 2
            )
    if scores.dim() == 2 and reduction != 1:
        yield from _class_loss(scores, target, reduction)


def _class_loss(scores: torch.Tensor, target: torch.Tensor, reduction: int) -> Iterator[TorchCall]:
    yield torch_call("weft.class_scores", f(4, 6), f(6, 8))
    yield torch_call("weft.sum_exp", scores, scores.amax(1, keepdim=True), 1)
    args = (scores, scores.logsumexp(1, keepdim=True), target, reduction, -100)
    gradient = f(len(target)) if reduction == 0 else f()
    for offset in (0, 2):
        yield torch_call("weft.class_loss", *args, offset)
        yield torch_call("weft.class_loss_backward", gradient, *args, offset)


def attention() -> Iterator[TorchCall]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    q, k, v, g = f(4, 5, 6, 8), f(4, 5, 6, 8), f(4, 5, 6, 8), f(4, 5, 6, 8)
    short, one = f(4, 5, 4, 8), f(4, 1, 6, 8)
    few = one.expand(4, 5, 6, 8)
    masks = (None, f(6, 6), f(4, 1, 6, 6), f(1, 1, 6, 6), f(4, 5, 6, 6))
    cases = [(g, q, k, v, False, mask) for mask in masks]
    cases += [(g, q, k, v, True, None), (g, q, few, few, False, None), (g, q, one, one, True, None)]
    cases += [(g, q, short, short, causal, None) for causal in (False, True)]
    cases += [(g[:, :, :4], q[:, :, :4], k, v, True, None)]
    grouped = (f(4, 8, 6, 4), f(4, 8, 6, 4), f(4, 4, 6, 4), f(4, 4, 6, 4))
    cases += [(*grouped, True, None), (*grouped, False, f(4, 1, 6, 6))]
    for gradient, query, key, value, causal, mask in cases:
        options = {} if mask is None else {"attn_mask": mask, "scale": 0.3}
        yield aten(name, query, key, value, 0.0, causal, **options)
        out, lse = getattr(A, name).default(query, key, value, 0.0, causal, **options)
        saved = (out, lse, 0.0, causal)
        yield aten(f"{name}_backward", gradient, query, key, value, *saved, **options)
    for tensors in ((g, q, k, v), grouped):
        yield from _attention_rows(*tensors)


def _attention_rows(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[TorchCall]:
    for offset in (0, 2, 5, 9):
        yield torch_call("weft.attention_rows", q, k, v, offset, scale=0.3)
        saved = attention_rows(q, k, v, offset, 0.3)
        yield torch_call("weft.attention_rows_backward", g, q, k, v, *saved, offset, scale=0.3)


def convolutions() -> Iterator[TorchCall]:
    plain = ((1, 1), (1, 1), (1, 1))
    yield from _convolution(f(5, 4, 6, 6), f(6, 4, 3, 3), False, 1, plain)
    yield from _convolution(f(5, 4, 6, 6), f(4, 6, 3, 3), True, 1, plain)
    yield from _convolution(f(5, 12, 6, 6), f(24, 3, 3, 3), False, 4, plain)
    yield from _convolution(f(5, 5, 6, 6), f(5, 1, 3, 3), False, 5, plain)
    yield from _convolution(f(5, 12, 6, 6), f(12, 2, 3, 3), True, 4, plain)
    yield from _convolution(f(5, 4, 9), f(6, 4, 3), False, 1, ((2,), (0,), (1,)))


def _convolution(
    x: torch.Tensor, w: torch.Tensor, transposed: bool, groups: int, plain: tuple[object, ...]
) -> Iterator[TorchCall]:
    rest = (*plain, transposed, (0,) * (x.dim() - 2), groups)
    outer = w.shape[1] * groups if transposed else w.shape[0]
    yield aten("convolution", x, w, f(outer), *rest)
    yield aten("convolution", x, w, None, *rest)
    g = f(*A.convolution.default(x, w, None, *rest).shape)
    yield aten("convolution_backward", g, x, w, (outer,), *rest, (True, True, True))
    yield aten("convolution_backward", g, x, w, None, *rest, (True, True, False))
    yield aten("convolution_backward", g, x, w, (outer,), *rest, (False, True, True))


def pooling() -> Iterator[TorchCall]:
    x = f(5, 4, 6, 6)
    window = ((3, 3), (2, 2), (1, 1))
    for image in (x, x[0]):
        yield aten("max_pool2d_with_indices", image, *window)
        out, indices = A.max_pool2d_with_indices.default(image, *window)
        yield aten(
            "max_pool2d_with_indices_backward",
            f(*out.shape), image, *window, (1, 1), False, indices,
        )  # fmt: skip
    yield aten("avg_pool2d", x, *window)
    out = A.avg_pool2d.default(x, *window)
    yield aten("avg_pool2d_backward", f(*out.shape), x, *window, False, True, None)
    yield aten("_adaptive_avg_pool2d", x, (2, 3))
    yield aten("_adaptive_avg_pool2d_backward", f(5, 4, 2, 3), x)
    yield aten("avg_pool1d", f(5, 4, 6), (2,))
    yield aten("adaptive_avg_pool1d", f(5, 4, 6), (3,))


def more_pooling() -> Iterator[TorchCall]:
    x, y = f(5, 4, 6, 6), f(5, 4, 4, 4, 4)
    out, indices = A.adaptive_max_pool2d.default(x, (2, 3))
    yield aten("adaptive_max_pool2d", x, (2, 3))
    yield aten("adaptive_max_pool2d_backward", f(*out.shape), x, indices)
    out, indices = A.adaptive_max_pool3d.default(y, (2, 3, 2))
    yield aten("adaptive_max_pool3d", y, (2, 3, 2))
    yield aten("adaptive_max_pool3d_backward", f(*out.shape), y, indices)
    window = ((2, 2, 2), (2, 2, 2), (0, 0, 0))
    out, indices = A.max_pool3d_with_indices.default(y, *window)
    yield aten("max_pool3d_with_indices", y, *window)
    rest = (*window, (1, 1, 1), False, indices)
    yield aten("max_pool3d_with_indices_backward", f(*out.shape), y, *rest)
    yield aten("avg_pool3d", y, *window)
    yield aten("avg_pool3d_backward", f(*out.shape), y, *window, False, True, None)
    yield aten("_adaptive_avg_pool3d", y, (2, 3, 2))
    yield aten("_adaptive_avg_pool3d_backward", f(5, 4, 2, 3, 2), y)


def padding() -> Iterator[TorchCall]:
    for dims in (1, 2, 3):
        x, pad = f(5, 4, *(4,) * dims), (1,) * (2 * dims)
        for name in (f"reflection_pad{dims}d", f"replication_pad{dims}d"):
            yield aten(name, x, pad)
            yield aten(f"{name}_backward", f(5, 4, *(6,) * dims), x, pad)
    yield aten("pixel_shuffle", f(5, 4, 3, 3), 2)
    yield aten("pixel_unshuffle", f(5, 4, 4, 4), 2)
    window = ((2, 2), (1, 1), (0, 0), (1, 1))
    yield aten("im2col", f(5, 4, 5, 5), *window)
    yield aten("col2im", f(5, 16, 16), (5, 5), *window)


def resampling() -> Iterator[TorchCall]:
    x, g = f(5, 4, 6), f(5, 4, 12)
    yield aten("upsample_nearest1d", x, (12,))
    yield aten("upsample_nearest1d_backward", g, (12,), (5, 4, 6))
    yield aten("upsample_linear1d", x, (12,), False)
    yield aten("upsample_linear1d_backward", g, (12,), (5, 4, 6), False)
    x, g = f(5, 4, 6, 6), f(5, 4, 12, 12)
    yield aten("upsample_nearest2d", x, (12, 12))
    yield aten("upsample_nearest2d_backward", g, (12, 12), (5, 4, 6, 6))
    for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
        yield aten(name, x, (12, 12), False)
        yield aten(f"{name}_backward", g, (12, 12), (5, 4, 6, 6), False)
    grid = torch.rand(5, 3, 4, 2, generator=GENERATOR, dtype=torch.float64) * 2 - 1
    yield aten("grid_sampler_2d", x, grid, 0, 0, False)
    mask = (True, True)
    yield aten("grid_sampler_2d_backward", f(5, 4, 3, 4), x, grid, 0, 0, False, mask)


def recurrent() -> Iterator[TorchCall]:
    x, h, c = f(3, 5, 4), f(5, 6), f(5, 6)
    weights = (f(24, 4), f(24, 6))
    for biases, reverse in (((f(24), f(24)), False), ((None, None), True)):
        operands = (x, *weights, *biases, h, c)
        yield torch_call("weft.lstm", *operands, reverse, False)
        made = lstm(*operands, reverse, True)
        yield torch_call("weft.lstm", *operands, reverse, True)
        for given in ((f(3, 5, 6), f(5, 6), f(5, 6)), (f(3, 5, 6), None, None)):
            yield torch_call("weft.lstm_backward", *given, *operands, *made, reverse)


FAMILIES = (
    recurrent, temporal_classification,
    normalizations, losses, attention, convolutions, pooling, more_pooling, padding, resampling,
)  # fmt: skip
