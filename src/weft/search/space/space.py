"""All points of a step's space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeAlias, final

import numpy as np

from weft.search.space.point import IN_TURN, ONCE, Layouts
from weft.search.space.points import Ints, Points, layouts_code, schedule_code

# Numbers of blocks that run again, and of those that wait in host memory.
_Kept: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True)
class Sizes:
    """The sizes that say how large the space is.

    Attributes:
        ranks: numbers of ranks that may be used.
        samples: of the batch; 0 where it cannot be cut.
        blocks: that come again; 1 where none do.
        parts: that stages can be made of, one at least each.
        cuts: true where there are layers that a Megatron grid cuts.
        positions: true where the activations between them have positions that can be split.
        hosts: true where devices have a host whose memory is not their own.
        experts: what the numbers of experts of all mixtures are multiples of; 0 without any.
        micro_batches: the number that is fixed; 0 for none.
        stages: the number of stages, of all ranks together, that is fixed, which may be more than there are parts; 0
            for none.
        idle: true where ranks along the data axis may be without a sample.
    """

    ranks: tuple[int, ...]
    samples: int
    blocks: int
    parts: int
    cuts: bool
    positions: bool
    hosts: bool = False
    experts: int = 0
    micro_batches: int = 0
    stages: int = 0
    idle: bool = False

    @property
    def kept(self) -> _Kept:
        """Ways of the results of blocks until the backward: kept, made again, or sent to the host."""
        if self.blocks < 2:
            return ((0, 0),)
        host = ((0, self.blocks),) if self.hosts else ()
        return ((0, 0), (self.blocks, 0), *host)


def points(sizes: Sizes) -> Points:
    """All points of the space, each once.

    Of blocks all or none run again here: how many of them suffice is found when the memory of both is known.
    """
    found = [part for ranks in sizes.ranks for part in _of_ranks(sizes, ranks)]
    return Points(np.concatenate(found)) if found else Points.of(())


def _of_ranks(sizes: Sizes, ranks: int) -> Iterator[Ints]:
    for stages in divisors(ranks):
        if stages > max(sizes.parts, 1) and stages != sizes.stages:
            continue
        for tensor in divisors(ranks // stages):
            data = ranks // stages // tensor
            fits = _in_time(sizes, data)
            for turns in _turns(sizes.blocks, stages):
                for layouts, outer in _ways(sizes, data, tensor, stages):
                    zeros = 4 if data > 1 and layouts != "free" else 1
                    inner = _inner(fits, _schedules(stages, turns), zeros, sizes.kept)
                    grid = data, tensor, stages, turns
                    yield _rows(grid, layouts, outer, inner)
                    if zeros > 1 and sizes.experts and sizes.experts % data == 0:
                        yield _rows(grid, layouts, outer, inner, experts=True)


def _in_time(sizes: Sizes, data: int) -> tuple[int, ...]:
    """Numbers of micro-batches of which each has a sample for every rank along the data axis, or more for some."""
    samples, fixed = sizes.samples, sizes.micro_batches
    if not samples:
        return (1,)
    every = (fixed,) if fixed else (1, *_powers(samples))
    return tuple(
        each for each in every if samples % each == 0 and (sizes.idle or samples // each >= data)
    )


def _turns(blocks: int, stages: int) -> Sequence[int]:
    """Numbers of parts of a pipeline that each group of ranks may run: of equally many blocks, where these can be."""
    if stages == 1:
        return [1]
    most = blocks // stages
    return divisors(most) if blocks % stages == 0 else [1, *_powers(most)]


def _schedules(stages: int, turns: int) -> tuple[str, ...]:
    if stages == 1:
        return ("",)
    return ("", *(IN_TURN if turns > 1 else ONCE))


# The coordinates that are combined on a grid, in this order.
_INNER = ("micro_batches", "schedule", "zero", "recompute", "offload")


@cache
def _inner(micro: tuple[int, ...], schedules: tuple[str, ...], zeros: int, kept: _Kept) -> Ints:
    """Micro-batches, schedules, levels of ZeRO, and what becomes of the results of blocks: all combinations."""
    codes = map(schedule_code, schedules)
    every = product(micro, codes, range(zeros), kept)
    return np.array([(m, s, z, *k) for m, s, z, k in every], np.int64).reshape(-1, len(_INNER))


def _rows(
    grid: tuple[int, int, int, int],
    layouts: Layouts,
    outer: bool,
    inner: Ints,
    experts: bool = False,
) -> Ints:
    data, tensor, stages, turns = grid
    return Points.made(
        len(inner),
        data=data,
        tensor=tensor,
        stages=stages,
        layouts=layouts_code(layouts),
        outer=int(outer),
        turns=turns,
        experts=int(experts),
        **dict(zip(_INNER, inner.T, strict=True)),
    ).rows


def _ways(sizes: Sizes, data: int, tensor: int, stages: int) -> Iterator[tuple[Layouts, bool]]:
    """Ways to lay a model out on a grid, and whether the tensor axis is the outer one."""
    if tensor == 1:
        yield "data", False
    if stages == 1 and data * tensor > 1 and (tensor == 1 or data > 1):  # one axis has no two names
        yield "free", False
    if tensor == 1 or not sizes.cuts:
        return
    for outer in (False, True) if data > 1 else (False,):
        yield "columns", outer
        if sizes.positions:
            yield "sequence", outer


@cache
def divisors(number: int) -> Sequence[int]:
    """The divisors of a number, the least first; none of 0."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _powers(most: int) -> list[int]:
    """2, 4, … up to `most`."""
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def ranks_used(devices: int, stages: int = 1) -> tuple[int, ...]:
    """Numbers of ranks that are tried, all first: the divisors of the number of devices.

    Where none of them can be so many stages, also the most that can.
    """
    found = divisors(devices)
    if all(each % stages for each in found) and devices >= stages:
        found = sorted((*found, devices - devices % stages))
    return tuple(reversed(found))
