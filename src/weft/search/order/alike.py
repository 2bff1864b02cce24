"""Points alike: how much longer and larger than by rough estimates those were that were looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple, TypeAlias, final

import numpy as np

from weft.search.space.points import Floats, Ints, Mask, Points

Column: TypeAlias = Ints | Mask
# What points have in common, by name, a row for each.
Columns: TypeAlias = Mapping[str, Column]
_Key: TypeAlias = tuple[tuple[str, int], ...]

# What points have in common that are alike, the most alike last.
_LAID = ("layouts", "staged", "uneven")
_CUT = (*_LAID, "experts", "tensor", "outer")
_AGAIN = (*_CUT, "recompute")
_ALIKE: tuple[tuple[str, ...], ...] = ((), _LAID, _CUT)
# The same where samples of a micro-batch matter: of these the ones with as many count, or else with nearly as many.
_ALIKE_IN_SAMPLES: tuple[tuple[str, ...], ...] = (_AGAIN, (*_AGAIN, "gathers"))
# What points have in common that take about as many bytes, the most alike last.
_AS_LARGE: tuple[tuple[str, ...], ...] = (
    ("staged", "zero", "recompute"),
    ("staged", "zero", "recompute", "layouts"),
    ("staged", "zero", "recompute", "layouts", "tensor", "samples"),
)
# What points have in common that are refused together, and times as long as estimated that they are thought to take.
_REFUSED_ALIKE, _REFUSED = ("layouts", "tensor", "outer"), 2.0


@final
class Ratios(NamedTuple):
    """Measures of each of some points over rough estimates of them.

    Attributes:
        seconds: of a step.
        memory: bytes beside what devices reserve.
    """

    seconds: Floats
    memory: Floats


@final
class Alike:
    """Ratios of points, better with each that is learned."""

    def __init__(self) -> None:
        self._seconds = dict[_Key, list[float]]()
        self._in_samples = dict[_Key, dict[int, list[float]]]()
        self._memory = dict[_Key, list[float]]()
        self._refused = set[_Key]()

    @property
    def known(self) -> int:
        """The number of points that were learned."""
        return len(self._seconds.get((), ())) + len(self._refused)

    def learn(self, columns: Columns, seconds: float, memory: float) -> None:
        """Correct those alike by what a point took over its rough estimate; its columns have one row."""
        for ratios, alike, ratio in (
            (self._seconds, _ALIKE, seconds),
            (self._memory, _AS_LARGE, memory),
        ):
            for names in alike:
                ratios.setdefault(_key(names, columns), []).append(ratio)
        for names in _ALIKE_IN_SAMPLES:
            known = self._in_samples.setdefault(_key(names, columns), {})
            known.setdefault(int(columns["samples"][0]), []).append(seconds)

    def refuse(self, columns: Columns) -> None:
        """Have those alike wait for others, as a point with a tensor axis was refused: most would be refused, too."""
        self._refused.add(_key(_REFUSED_ALIKE, columns))

    def ratios(self, columns: Columns) -> Ratios:
        """Of each point the ratios of those most alike of which any are known; 1 where none are."""
        seconds = _median(self._seconds, columns)
        for key in sorted(self._in_samples, key=len):
            alike = _like(key, columns)
            seconds[alike] = _nearest(self._in_samples[key], columns["samples"][alike])
        for key in self._refused:
            seconds[_like(key, columns)] *= _REFUSED
        return Ratios(seconds, _median(self._memory, columns))


def columns_of(points: Points, samples: int) -> Columns:
    """The columns of points, of a batch with so many samples."""
    return {
        "layouts": points.layouts,
        "staged": points.stages > 1,
        "tensor": points.tensor,
        "outer": points.outer,
        "samples": samples // (points.data * points.micro_batches),
        "uneven": samples % (points.data * points.micro_batches) > 0,
        "recompute": points.recompute > 0,
        "experts": points.experts,
        "gathers": points.zero == 3,
        "zero": points.zero,
    }


def _median(ratios: Mapping[_Key, list[float]], columns: Columns) -> Floats:
    found = np.ones(len(columns["zero"]))
    for key in sorted(ratios, key=len):
        found[_like(key, columns)] = median(ratios[key])
    return found


def _nearest(known: Mapping[int, list[float]], samples: Column) -> Floats:
    """For each number of samples the median of the ratios that are known of the nearest one, by their quotient."""
    numbers = np.array(sorted(known))
    ratios = np.array([median(known[number]) for number in numbers])
    apart = np.abs(np.log((samples[:, None] + 1) / (numbers + 1)))
    found: Floats = ratios[apart.argmin(axis=1)]
    return found


def _key(names: Iterable[str], columns: Columns) -> _Key:
    """By which the first of some points is known again in others alike."""
    return tuple((name, int(columns[name][0])) for name in names)


def _like(key: _Key, columns: Columns) -> Mask:
    """The points that are as the key says."""
    found: Mask = np.ones(len(columns["zero"]), np.bool_)
    for name, value in key:
        found &= columns[name] == value
    return found
