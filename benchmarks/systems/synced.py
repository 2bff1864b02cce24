"""BatchNorm with the statistics of the batches of all ranks, which torch.nn.SyncBatchNorm has on GPUs only.

Torch's kernels, and an all-reduce of two numbers for each channel in the forward and in the backward, as there
(torch/nn/modules/_functions.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

aten = torch.ops.aten


class SyncedBatchNorm(nn.BatchNorm2d):
    """In training; every rank must have as many samples."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.training
        assert self.momentum is not None
        found, mean, var = _Norm.apply(x, self.weight, self.bias, self.eps)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        return found


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        own_mean, own_var = aten.batch_norm_update_stats.default(x, None, None, 0.0)
        moments = torch.stack([own_mean, own_var + own_mean.square()])
        dist.all_reduce(moments)
        mean, squares = moments / dist.get_world_size()
        var = squares - mean.square()
        found, *_ = aten.native_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.mark_non_differentiable(mean, var)
        return found, mean, var

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        channels = (1, -1, 1, 1)
        centred = (x - mean.view(channels)) * inverse.view(channels)
        own = torch.stack([gradient.sum((0, 2, 3)), (gradient * centred).sum((0, 2, 3))])
        bias, scale = own
        sums = own.clone()
        dist.all_reduce(sums)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        shift, slope = (sums / count).unbind()
        centred.mul_(slope.view(channels)).add_(shift.view(channels))
        made = (gradient - centred) * (weight * inverse).view(channels)
        return made, scale, bias, None


def synced(module: nn.Module) -> nn.Module:
    """The module with such norms in place of its own, on the same parameters and buffers."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            made = SyncedBatchNorm(child.num_features, child.eps, child.momentum)
            made.load_state_dict(child.state_dict())
            setattr(module, name, made)
        else:
            synced(child)
    return module
