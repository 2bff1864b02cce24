"""Random ops written with `weft.uniform`, which draws by global position so that masks do not depend on layouts.

Draws of half-precision dtypes are made in float32, so that one stream of numbers serves all of
them. Bernoulli is `uniform < p`; normal numbers come from Box and Muller (1958), whose logarithm
never sees 0 because uniform is < 1; other distributions from the inverse of their distribution
function. Samples and permutations are in `weft.capture.ops.random`. An op that is given a generator
stays unchanged and is refused later: weft does not draw its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from weft.capture.fx.generators import note_draw
from weft.capture.fx.private import Function, stands_for

aten = torch.ops.aten

Draw = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]

# Significant bits: a uniform number with more of them would round up to 1.
_BITS = {torch.float16: 11, torch.bfloat16: 8}


TABLE: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def _stands_for(*names: str) -> Callable[[Function], Function]:
    def note(function: Function) -> Function:
        stands_for(TABLE, *names)(without_generator(function))
        return function

    return note


def without_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for calls without a generator; with one, NotImplemented."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        given = [*args, named.pop("generator", None)]
        if any(isinstance(value, torch.Generator) for value in given):
            return NotImplemented
        return function(*(given[:-1]), **named)

    return call


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
    note_draw(device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = list(size)
    drawn: Tensor = torch.ops.weft.uniform(
        whole, [0] * len(whole), whole, 0, dtype=wide, device=device
    )
    return drawn


def unit(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1) of any floating or complex dtype, as `torch.rand` draws them."""
    if dtype.is_complex:
        real = dtype.to_real()
        return torch.complex(unit(size, real, device), unit(size, real, device))
    drawn = uniform(size, dtype, device)
    if dtype not in _BITS:
        return drawn.to(dtype)
    steps = 2.0 ** _BITS[dtype]
    return (torch.floor(drawn * steps) / steps).to(dtype)


def normal(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers of mean 0 and variance 1 (of a complex number: of both its parts together)."""
    if dtype.is_complex:
        real = dtype.to_real()
        parts = torch.complex(normal(size, real, device), normal(size, real, device))
        return parts * math.sqrt(0.5)
    radius = torch.sqrt(-2 * torch.log(1 - uniform(size, dtype, device)))
    return (radius * torch.cos(2 * math.pi * uniform(size, dtype, device))).to(dtype)


def exponential(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, rate: float = 1.0
) -> Tensor:
    """Exponential numbers, never 0: users take their logarithm (Gumbel noise)."""
    drawn = -torch.log1p(-uniform(size, dtype, device)) / rate
    return drawn.clamp_min(torch.finfo(dtype).tiny)


def _integers(low: int, high: int, size: Sequence[int], device: torch.device) -> Any:
    """Whole numbers in [low, high); NotImplemented where 53 random bits would leave some of them out."""
    if high - low > _EXACT:
        return NotImplemented
    drawn = uniform(size, torch.float64, device)
    return torch.floor(drawn * (high - low)).to(torch.int64) + low


_EXACT = 2**53  # whole numbers up to here are float64


def _hit(like: Tensor, p: Tensor | float) -> Tensor:
    if not isinstance(p, Tensor):
        return uniform(like.shape, like.dtype, like.device) < p
    wide = p if p.dtype in (torch.float32, torch.float64) else p.to(torch.float32)
    return uniform(like.shape, wide.dtype, like.device) < wide


@_stands_for("bernoulli.default")
def _bernoulli(self: Tensor) -> Tensor:
    return _hit(self, self).to(self.dtype)


@_stands_for("bernoulli.p", "bernoulli.Tensor")
def _bernoulli_p(self: Tensor, p: Tensor | float) -> Tensor:
    return _hit(self, p).to(self.dtype)


@_stands_for("bernoulli_.float", "bernoulli_.Tensor")
def _bernoulli_(self: Tensor, p: Tensor | float = 0.5) -> Tensor:
    return self.copy_(_hit(self, p))


@_stands_for("native_dropout.default")
def _native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input, torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    kept = _hit(input, 1 - p)
    return input * kept * (1 / (1 - p)), kept


@_stands_for("native_dropout_backward.default")
def _native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad_output * mask * scale


@_stands_for("rrelu_with_noise.default")
def _rrelu(
    self: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    _: None = None,
) -> Tensor:
    """`noise` gets the slope of each element, which is what the backward reads (torch's own backward op)."""
    if not training:
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2)
    slope = unit(self.shape, self.dtype, self.device) * (upper - lower) + lower
    noise.copy_(torch.where(self > 0, torch.ones_like(self), slope))
    return self * noise


@_stands_for("rrelu_with_noise_.default")
def _rrelu_(self: Tensor, noise: Tensor, *args: Any) -> Tensor:
    return self.copy_(_rrelu(self, noise, *args))


@_stands_for("rrelu_with_noise_backward.default")
def _rrelu_backward(
    grad_output: Tensor,
    self: Tensor,
    noise: Tensor,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Tensor:
    if training:
        return grad_output * noise
    return torch.where(self > 0, grad_output, grad_output * ((lower + upper) / 2))


def _made(draw: Draw) -> Callable[..., Tensor]:
    def make(
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: Any,
    ) -> Tensor:
        return draw(size, dtype or torch.get_default_dtype(), torch.device(device or "cpu"))

    return make


def _made_like(draw: Draw) -> Callable[..., Tensor]:
    def make(
        self: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: Any,
    ) -> Tensor:
        return draw(self.shape, dtype or self.dtype, device or self.device)

    return make


for _name, _draw in (("rand", unit), ("randn", normal)):
    _stands_for(f"{_name}.default", f"{_name}.generator")(_made(_draw))
    _stands_for(f"{_name}_like.default")(_made_like(_draw))


@_stands_for("randint.default", "randint.generator", "randint.low", "randint.low_generator")
def _randint(
    *args: Any, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Any:
    """The bounds, of which the low one may be left out, and the size."""
    *low, high, size = args
    drawn = _integers(low[0] if low else 0, high, size, torch.device(device or "cpu"))
    return drawn if drawn is NotImplemented else drawn.to(dtype or torch.int64)


@_stands_for("randint_like.default", "randint_like.low_dtype")
def _randint_like(self: Tensor, *bounds: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    *low, high = bounds
    drawn = _integers(low[0] if low else 0, high, self.shape, self.device)
    return drawn if drawn is NotImplemented else drawn.to(dtype or self.dtype)


@_stands_for("random_.default", "random_.to", "random_.from")
def _random_(self: Tensor, *bounds: int | None) -> Any:
    """Whole numbers in [low, to); without `to`, up to the last that the dtype holds exactly."""
    *low, to = bounds or (None,)
    if to is None and self.dtype.is_floating_point:
        to = int(2 / torch.finfo(self.dtype).eps) + 1
    elif to is None:
        to = 2 if self.dtype == torch.bool else int(torch.iinfo(self.dtype).max) + 1
    drawn = _integers(low[0] or 0 if low else 0, to, self.shape, self.device)
    return drawn if drawn is NotImplemented else self.copy_(drawn)


@_stands_for("uniform_.default")
def _uniform_(self: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return self.copy_(unit(self.shape, self.dtype, self.device) * (high - low) + low)


@_stands_for("normal_.default")
def _normal_(self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return self.copy_(normal(self.shape, self.dtype, self.device) * std + mean)


@_stands_for("log_normal_.default")
def _log_normal_(self: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return self.copy_(torch.exp(normal(self.shape, self.dtype, self.device) * std + mean))


@_stands_for("exponential_.default")
def _exponential_(self: Tensor, lambd: float = 1.0) -> Tensor:
    return self.copy_(exponential(self.shape, self.dtype, self.device, lambd))


@_stands_for("cauchy_.default")
def _cauchy_(self: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    drawn = uniform(self.shape, self.dtype, self.device)
    return self.copy_(median + sigma * torch.tan(math.pi * (drawn - 0.5)))


@_stands_for("geometric_.default")
def _geometric_(self: Tensor, p: float) -> Tensor:
    """The number of throws of a coin until the first heads: at least one."""
    if p == 1:
        return self.fill_(1)
    drawn = uniform(self.shape, self.dtype, self.device)
    return self.copy_(torch.ceil(torch.log1p(-drawn) / math.log1p(-p)).clamp_min(1))


@_stands_for("normal.float_float")
def _normal_numbers(mean: float, std: float, size: Sequence[int], **named: Any) -> Tensor:
    return _made(normal)(size, **named) * std + mean


@_stands_for("normal.Tensor_float", "normal.Tensor_Tensor")
def _normal_tensors(mean: Tensor, std: Tensor | float = 1.0) -> Tensor:
    size = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        mean.shape, std.shape if isinstance(std, Tensor) else ()
    )
    return normal(size, mean.dtype, mean.device) * std + mean


@_stands_for("normal.float_Tensor")
def _normal_scale(mean: float, std: Tensor) -> Tensor:
    return normal(std.shape, std.dtype, std.device) * std + mean


# Samples and permutations, whose numbers depend on others of their row: sorts and sums of `weft.uniform` keys.
#
# Keys are float64, so that two of them hardly ever agree. A row is never cut, because a sort or a
# running sum needs all of it; rows are drawn by their global position like everything else.


@_stands_for("randperm.default", "randperm.generator")
def _randperm(
    n: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    keys = uniform([n], torch.float64, torch.device(device or "cpu"))
    return torch.sort(keys).indices.to(dtype or torch.int64)


@_stands_for("multinomial.default")
def _multinomial(self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    weights = self.to(torch.float64)
    if not replacement:
        # The first to arrive when class `i` takes an exponential time of rate `weights[i]`. Efraimidis and Spirakis:
        # Weighted random sampling with a reservoir (2006).
        times = exponential(weights.shape, torch.float64, weights.device)
        return torch.topk(weights / times, num_samples).indices
    # The first class whose running sum of weights exceeds a uniform number.
    sums = torch.cumsum(weights, -1)
    drawn = uniform([*weights.shape[:-1], num_samples], torch.float64, weights.device)
    return torch.searchsorted(sums, drawn * sums[..., -1:], right=True)


@_stands_for("poisson.default")
def _poisson(self: Tensor, _: None = None) -> Tensor:
    """One less than the least k for which fewer than k events have a probability above a uniform number."""
    rate = self.to(torch.float64)
    drawn = uniform(self.shape, torch.float64, self.device)
    # Beyond 40 standard deviations lies less than a number of 53 bits can tell.
    low, high = torch.zeros_like(rate), torch.ceil(rate + 40 * torch.sqrt(rate) + 40)
    for _halving in range(_HALVINGS):
        middle = torch.ceil((low + high) / 2)
        enough = torch.special.gammaincc(middle, rate) > drawn
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle)
    return (high - 1).to(self.dtype)


_HALVINGS = 32  # enough for rates up to 4e9
