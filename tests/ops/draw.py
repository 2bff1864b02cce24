"""Random operands from one fixed seed, and calls of ATen ops by short names."""

from __future__ import annotations

import torch

from tools.oracles.rules import TorchCall, torch_call

GENERATOR = torch.Generator().manual_seed(7)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=GENERATOR)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) < 0.5


def aten(name: str, *args: object, **kwargs: object) -> TorchCall:
    return torch_call(f"aten.{name}" if "." in name else f"aten.{name}.default", *args, **kwargs)
