"""Random ops written with `weft.uniform`, which draws by global position so that masks do not depend on layouts.

Draws of half-precision dtypes are made in float32, so that one stream of numbers serves all of them. Bernoulli is
`uniform < p`; normal numbers come from Box and Muller (1958), whose logarithm never sees 0 because uniform is < 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor

# Significant bits: a uniform number with more of them would round up to 1.
_BITS = {torch.float16: 11, torch.bfloat16: 8}


@torch.library.custom_op(
    "weft::uniform",
    mutates_args=(),
    schema="(SymInt[] size, SymInt[] offset, SymInt[] length, int salt, *, ScalarType dtype, Device device) -> Tensor",
)
def _uniform(
    size: Sequence[int],
    offset: Sequence[int],
    length: Sequence[int],
    salt: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.rand(list(length), dtype=dtype, device=device)


@_uniform.register_fake
def _(
    size: Sequence[int],
    offset: Sequence[int],
    length: Sequence[int],
    salt: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(list(length), dtype=dtype, device=device)


def uniform(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), shape `size`; float32 or float64. The salt is given once the graph is complete."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = list(size)
    drawn: Tensor = torch.ops.weft.uniform(
        whole, [0] * len(whole), whole, 0, dtype=wide, device=device
    )
    return drawn


def _unit(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = uniform(size, dtype, device)
    if dtype not in _BITS:
        return drawn.to(dtype)
    steps = 2.0 ** _BITS[dtype]
    return (torch.floor(drawn * steps) / steps).to(dtype)


def _normal(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    radius = torch.sqrt(-2 * torch.log(1 - uniform(size, dtype, device)))
    return (radius * torch.cos(2 * math.pi * uniform(size, dtype, device))).to(dtype)


def _integers(low: int, high: int, size: Sequence[int], device: torch.device) -> Tensor:
    drawn = uniform(size, torch.float64, device)
    return torch.floor(drawn * (high - low)).to(torch.int64) + low


def _unseeded(generator: Any) -> bool:
    return generator is None


def _hit(like: Tensor, p: Tensor | float) -> Tensor:
    """True where a coin with probability `p` of heads shows heads."""
    if not isinstance(p, Tensor):
        return uniform(like.shape, like.dtype, like.device) < p
    wide = p if p.dtype in (torch.float32, torch.float64) else p.to(torch.float32)
    return uniform(like.shape, wide.dtype, like.device) < wide


def _bernoulli(self: Tensor, *, generator: Any = None) -> Any:
    return _hit(self, self).to(self.dtype) if _unseeded(generator) else NotImplemented


def _bernoulli_p(self: Tensor, p: float, *, generator: Any = None) -> Any:
    return _hit(self, p).to(self.dtype) if _unseeded(generator) else NotImplemented


def _bernoulli_(self: Tensor, p: Tensor | float = 0.5, *, generator: Any = None) -> Any:
    return self.copy_(_hit(self, p)) if _unseeded(generator) else NotImplemented


def _native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input, torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    kept = _hit(input, 1 - p)
    return input * kept * (1 / (1 - p)), kept


def _native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad_output * mask * scale


def _options(
    dtype: torch.dtype | None, device: torch.device | None
) -> tuple[torch.dtype, torch.device]:
    return dtype or torch.get_default_dtype(), torch.device(device or "cpu")


def _rand(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _unit(size, *_options(dtype, device))


def _randn(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _normal(size, *_options(dtype, device))


def _rand_like(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _unit(self.shape, dtype or self.dtype, device or self.device)


def _randn_like(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _normal(self.shape, dtype or self.dtype, device or self.device)


def _randint(
    high: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _randint_low(0, high, size, dtype=dtype, device=device)


def _randint_low(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _integers(low, high, size, torch.device(device or "cpu")).to(dtype or torch.int64)


def _randint_like(self: Tensor, high: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _integers(0, high, self.shape, self.device).to(dtype or self.dtype)


def _randint_like_low(
    self: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return _integers(low, high, self.shape, self.device).to(dtype or self.dtype)


def _uniform_(
    self: Tensor, from_: float = 0.0, to: float = 1.0, *, generator: Any = None, **named: Any
) -> Any:
    if not _unseeded(generator):
        return NotImplemented
    low = named.get("from", from_)
    return self.copy_(_unit(self.shape, self.dtype, self.device) * (to - low) + low)


def _normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    if not _unseeded(generator):
        return NotImplemented
    return self.copy_(_normal(self.shape, self.dtype, self.device) * std + mean)


def _normal_tensors(mean: Tensor, std: Tensor | float = 1.0, *, generator: Any = None) -> Any:
    if not _unseeded(generator):
        return NotImplemented
    size = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        mean.shape, std.shape if isinstance(std, Tensor) else ()
    )
    return _normal(size, mean.dtype, mean.device) * std + mean


def _normal_scale(mean: float, std: Tensor, *, generator: Any = None) -> Any:
    if not _unseeded(generator):
        return NotImplemented
    return _normal(std.shape, std.dtype, std.device) * std + mean


def _exponential_(self: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Any:
    if not _unseeded(generator):
        return NotImplemented
    # 0 is no legal draw: users take its logarithm (Gumbel noise).
    drawn = -torch.log1p(-uniform(self.shape, self.dtype, self.device)) / lambd
    return self.copy_(drawn.clamp_min(torch.finfo(self.dtype).tiny))


TABLE: dict[str, Callable[..., Any]] = {
    "bernoulli.default": _bernoulli,
    "bernoulli.p": _bernoulli_p,
    "bernoulli_.float": _bernoulli_,
    "bernoulli_.Tensor": _bernoulli_,
    "native_dropout.default": _native_dropout,
    "native_dropout_backward.default": _native_dropout_backward,
    "rand.default": _rand,
    "randn.default": _randn,
    "rand_like.default": _rand_like,
    "randn_like.default": _randn_like,
    "randint.default": _randint,
    "randint.low": _randint_low,
    "randint_like.default": _randint_like,
    "randint_like.low_dtype": _randint_like_low,
    "uniform_.default": _uniform_,
    "normal_.default": _normal_,
    "normal.Tensor_float": _normal_tensors,
    "normal.Tensor_Tensor": _normal_tensors,
    "normal.float_Tensor": _normal_scale,
    "exponential_.default": _exponential_,
}
