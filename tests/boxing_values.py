"""Values that lie on a grid: whole arrays cut into local ones and put together again, with numpy."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.layout import SBP, Broadcast, Layout, Partial, Split, placement

REDUCE: dict[str, np.ufunc] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
Array: TypeAlias = npt.NDArray[Any]
Locals: TypeAlias = dict[int, Array]


def reduce(reduction: str, tensors: list[Array]) -> Array:
    return np.asarray(REDUCE[reduction].reduce(np.stack(tensors), axis=0))


def scatter(value: Array, layout: Layout) -> Locals:
    """Local tensors of `value` in `layout`; the ranks of a Partial hold different random parts of it."""
    rng = np.random.default_rng(7)
    held: dict[tuple[int, ...], Array] = {(): value}
    for axis, parts in enumerate(layout.placement.shape):
        held = {
            (*at, index): piece
            for at, tensor in held.items()
            for index, piece in enumerate(_cut(tensor, layout.sbp[axis], parts, rng))
        }
    # A Broadcast axis repeats its tensor before a later axis draws random parts: draw them once.
    same = {at: _canonical(at, layout) for at in held}
    return {rank: held[same[at]] for rank, at in layout.placement.coordinates.items()}


def _canonical(at: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    return tuple(0 if isinstance(s, Broadcast) else i for i, s in zip(at, layout.sbp, strict=True))


def _cut(tensor: Array, sbp: SBP, parts: int, rng: np.random.Generator) -> list[Array]:
    if isinstance(sbp, Split):
        return np.array_split(tensor, parts, axis=sbp.dim)
    if isinstance(sbp, Broadcast):
        return [tensor] * parts
    noise = [rng.integers(1, 9, tensor.shape) for _ in range(parts - 1)]
    return shares(sbp.reduction, tensor, noise)


def shares(reduction: str, tensor: Array, noise: list[Array]) -> list[Array]:
    """One array more than `noise` has; their reduction is `tensor`."""
    signs = [1 - 2 * (extra % 2) for extra in noise]
    every: dict[str, list[Any]] = {
        "sum": [*noise, tensor - sum(noise)],
        "max": [*(np.minimum(tensor, extra) for extra in noise), tensor],
        "min": [*(np.maximum(tensor, extra) for extra in noise), tensor],
        "prod": [*signs, tensor * math.prod(signs)],
        "and": [*(tensor | extra for extra in noise), tensor],
        "or": [*(tensor & extra for extra in noise), tensor],
        "xor": [*noise, np.bitwise_xor.reduce([tensor, *noise])],
    }
    return [np.asarray(share) for share in every[reduction]]


def gather(held: Locals, layout: Layout) -> Array:
    """The whole value of local tensors; raises when copies on a Broadcast axis differ."""
    at = {place: held[rank] for rank, place in layout.placement.coordinates.items()}
    for axis in reversed(range(layout.placement.axes)):
        lines: dict[tuple[int, ...], list[Array]] = {}
        for place, tensor in sorted(at.items(), key=lambda item: item[0]):
            lines.setdefault(place[:axis], []).append(tensor)
        at = {place: _join(tensors, layout.sbp[axis]) for place, tensors in lines.items()}
    return at[()]


def _join(tensors: list[Array], sbp: SBP) -> Array:
    if isinstance(sbp, Split):
        return np.concatenate(tensors, axis=sbp.dim)
    if isinstance(sbp, Partial):
        return reduce(sbp.reduction, tensors)
    for tensor in tensors[1:]:
        np.testing.assert_array_equal(tensor, tensors[0])
    return tensors[0]


Case: TypeAlias = tuple[tuple[int, ...], Layout, Layout, list[Any]]


def recorded_cases() -> list[Case]:
    """(whole shape, layout before, layout after, what each of 4 ranks holds afterwards), as OneFlow recorded them."""
    path = Path(__file__).parent / "boxing" / "data" / "oneflow.jsonl.gz"
    rows = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    return [
        (tuple(shape), _layout(ranks, sbps), _layout(other, wanted), held)
        for shape, ranks, sbps, other, wanted, held in rows
    ]


def _layout(ranks: list[Any], sbps: list[str]) -> Layout:
    known: dict[str, SBP] = {"B": Broadcast(), "P": Partial(), "S0": Split(0), "S1": Split(1)}
    return Layout(placement("cpu", ranks), tuple(known[text] for text in sbps))


def counted(shape: tuple[int, ...]) -> Array:
    """1, 2, 3, … in row-major order."""
    return np.arange(1, math.prod(shape) + 1).reshape(shape)
