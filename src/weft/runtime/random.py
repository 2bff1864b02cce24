"""Random numbers indexed by their global position: the same numbers whatever the layout.

Element number `p` of the whole tensor (row-major) that op `salt` draws in step `step` is a hash of
`key(seed, step, salt)` and `p`: splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014) with `p` as its state's index. So any block of any tensor can be drawn by
itself, on any device, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from weft.ops.weft_ops import CPU_CHUNK, DEVICE_CHUNK

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

# Random bits of a result: as many as its significand holds.
_BITS = {torch.float64: 53}


def draw_key(seed: int, step: int, salt: int) -> int:
    """The 64-bit key of one random op in one step."""
    key = _mix(seed & _MASK)
    key = _mix((key + step * _GOLDEN) & _MASK)
    return _mix((key ^ salt * _GOLDEN) & _MASK)


def uniform(
    seed: int,
    step: int,
    size: Sequence[int],
    offset: Sequence[int],
    length: Sequence[int],
    salt: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw the block `[offset, offset + length)` of a whole tensor of uniform numbers in [0, 1).

    Args:
        size: shape of the whole tensor.
        offset, length: where the block begins and its shape.
        dtype: a floating dtype; float64 has 53 random bits, every other one is drawn as float32
            with 24 and rounded towards zero, so that 1 never comes out.

    Returns:
        Shape `length`.
    """
    key = _signed(draw_key(seed, step, salt))
    return _draw(key, size, offset, length, dtype=dtype, device=device)


@final
class DrawKeys:
    """The keys of a segment's random ops in the memory of a device, written before each replay."""

    def __init__(self, seed: int, count: int, device: torch.device) -> None:
        self._seed = seed
        self._keys = torch.zeros(count, dtype=torch.int64, device=device)
        # The place of each op's key, by its salt.
        self._places: dict[int, int] = {}

    def draw(
        self,
        size: Sequence[int],
        offset: Sequence[int],
        length: Sequence[int],
        salt: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The draw of `uniform` for the step whose keys are there when it runs."""
        place = self._places.setdefault(salt, len(self._places))
        return _draw(self._keys[place], size, offset, length, dtype=dtype, device=device)

    def write(self, step: int) -> None:
        """Put the keys of a step there, for all ops that have drawn once."""
        if self._places:
            own = [_signed(draw_key(self._seed, step, salt)) for salt in self._places]
            keys = torch.tensor(own, dtype=torch.int64, pin_memory=self._keys.is_cuda)
            self._keys[: len(own)].copy_(keys, non_blocking=True)


def _draw(
    key: int | Tensor,
    size: Sequence[int],
    offset: Sequence[int],
    length: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    result = torch.empty(tuple(length), dtype=exact, device=device)
    if result.numel():
        starts, run = _runs(size, offset, length, result.device)
        _fill(result.view(-1, run), starts, key)
    if dtype == exact:
        return result
    # Towards zero, so that no number below 1 becomes 1.
    scale = 2.0 ** {torch.bfloat16: 8, torch.float16: 11}[dtype]
    return result.mul_(scale).floor_().mul_(1 / scale).to(dtype)


def _mix(value: int) -> int:
    """One output of splitmix64 on Python integers."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ value >> 30) * _FIRST) & _MASK
    value = ((value ^ value >> 27) * _SECOND) & _MASK
    return value ^ value >> 31


def _runs(
    size: Sequence[int], offset: Sequence[int], length: Sequence[int], device: torch.device
) -> tuple[Tensor, int]:
    """Cut a block into runs that are contiguous in the whole tensor: their first positions, and their common length."""
    inner = len(size)
    while inner and length[inner - 1] == size[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the last dimension that is cut may still be part of a run
    strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    start = sum(first * stride for first, stride in zip(offset, strides, strict=True))
    starts = torch.full((1,), start, dtype=torch.int64, device=device)
    for dim in range(inner):
        along = torch.arange(length[dim], device=device) * strides[dim]
        starts = (starts.unsqueeze(-1) + along).view(-1)
    return starts, math.prod(length[inner:])


def _fill(result: Tensor, starts: Tensor, key: int | Tensor) -> None:
    run = result.shape[1]
    chunk = CPU_CHUNK if result.device.type == "cpu" else DEVICE_CHUNK
    width = min(run, chunk)
    rows = max(1, chunk // width)
    golden = _signed(_GOLDEN)
    along = torch.arange(width, device=result.device).mul_(golden)
    states = (starts + 1).mul_(golden).add_(key)
    for row in range(0, len(states), rows):
        for column in range(0, run, width):
            part = result[row : row + rows, column : column + width]
            first = states[row : row + rows, None] + _signed(column * _GOLDEN)
            _hash_into(part, first + along[: part.shape[1]])


def _hash_into(part: Tensor, state: Tensor) -> None:
    """Finish splitmix64 on the states (in place) and write them as fractions; a piece's memory ends with it."""
    shifted = torch.empty_like(state)
    _xor_shift(state, shifted, 30).mul_(_signed(_FIRST))
    _xor_shift(state, shifted, 27).mul_(_signed(_SECOND))
    bits = _BITS.get(part.dtype, 24)
    if bits > 64 - 31:  # the last shift mixes the low bits only
        _xor_shift(state, shifted, 31)
    _logical_shift(state, state, 64 - bits)
    part.copy_(state).mul_(2.0**-bits)  # exact: no more bits than the significand holds


def _xor_shift(state: Tensor, shifted: Tensor, bits: int) -> Tensor:
    _logical_shift(state, shifted, bits)
    return state.bitwise_xor_(shifted)


def _logical_shift(state: Tensor, out: Tensor, bits: int) -> None:
    """Shift right and fill with zeros: torch's shift of int64 fills with the sign."""
    torch.bitwise_right_shift(state, bits, out=out)
    out.bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
