"""Affine grids with a side of one point, whose backward torch cannot run without data."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp.decompositions import affine_grid_generator
from torch.overrides import TorchFunctionMode


@final
class GridsOfOne(TorchFunctionMode):
    """While this lasts, such a grid is made of plain ops; torch's backward of it writes the number 0 as a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.affine_grid, torch.affine_grid_generator):
            return _affine_grid(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _affine_grid(func: Any, theta: Tensor, size: Any, align_corners: bool | None = None) -> Any:
    if theta.dim() == 3 and len(size) - 1 == theta.shape[2] and 1 in size[2:] and 0 not in size:
        return affine_grid_generator(theta, list(size), bool(align_corners))
    return func(theta, size, align_corners)
