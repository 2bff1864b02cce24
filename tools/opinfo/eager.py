"""One op of the OpInfo database on eager global tensors: values, gradients and writes in place, against plain torch."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import weft
from tools.opinfo.check import UNINITIALIZED, reason_of
from tools.opinfo.layouts import local_tensors, placement_of
from tools.opinfo.reference import Backward, values_and_gradients
from tools.opinfo.samples import Case, cases, full_name
from tools.oracles.rules import close
from weft.errors import InternalError, RankFailure, WeftError
from weft.layout import SBP, Broadcast, Layout, Partial, Split

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.int8,
)
# Of results, by their dtype or that of the sample, whichever is coarser; others are equal.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.complex128: 1e-6,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
VERDICTS = ("right", "refused", "wrong", "crash")
FORMS = ("function", "in place")
# Ops with tensors that torch reads on the host, after the first; they stay plain.
_HOST = ("tensor_split",)
# One run in four is on 2 x 2 ranks.
_GRIDS = ((2,), (2,), (2,), (2, 2))
_RANKS = 4

Lay = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class EagerEffort:
    """How many samples of an op in each form and dtype, and in how many layouts each."""

    samples: int = 2
    layouts: int = 1
    dtypes: tuple[torch.dtype, ...] = DTYPES


@dataclass
class EagerReport:
    """What became of an op's runs.

    Attributes:
        counts: runs by dtype, form and verdict.
        reasons: for what is not right, verdict and what happened, with how often.
        seconds: how long the check took.
    """

    name: str
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """The worst of its runs."""
        found = {verdict for _, _, verdict in self.counts}
        return next((verdict for verdict in reversed(VERDICTS) if verdict in found), "right")

    @property
    def wrong(self) -> list[str]:
        """What no op may do."""
        return [text for verdict, text in self.reasons if verdict in ("wrong", "crash")]

    @property
    def refused(self) -> dict[str, int]:
        """Why runs were refused, each with its number."""
        return {t: count for (verdict, t), count in self.reasons.items() if verdict == "refused"}

    def add(self, dtype: torch.dtype, form: str, verdict: str, text: str) -> None:
        """Count one run."""
        self.counts[str(dtype).removeprefix("torch."), form, verdict] += 1
        if text:
            self.reasons[verdict, text] += 1


def lost(name: str, why: str) -> EagerReport:
    """The report of an op that ended its process."""
    report = EagerReport(name)
    report.add(torch.float32, "function", "crash", why)
    return report


def check_eager(info: Any, effort: EagerEffort) -> EagerReport:
    """Check an op in all dtypes that it has, as a function and in place."""
    report = EagerReport(full_name(info))
    with warnings.catch_warnings(), weft.local_world(_RANKS):
        warnings.simplefilter("ignore")
        for dtype in effort.dtypes:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            for form in FORMS:
                for case in islice(_cases(info, effort, dtype, form), effort.samples):
                    _check_case(case, dtype, form, effort, report)
    return report


def _cases(info: Any, effort: EagerEffort, dtype: torch.dtype, form: str) -> Iterator[Case]:
    try:
        found = list(cases(info, effort.samples, dtype, in_place=form == "in place"))
    except Exception:  # OpInfos whose samples cannot be made
        found = []
    yield from (case for case in found if case.tensors)


def _check_case(
    case: Case, dtype: torch.dtype, form: str, effort: EagerEffort, report: EagerReport
) -> None:
    try:
        seeds, known, again = _known(case)
    except Exception:  # whatever the op makes of its own sample
        return
    fixed = all(_same(known[name], again[name], 0.0) for name in known)
    fixed = fixed and case.name.split(".")[0] not in UNINITIALIZED
    for number in range(effort.layouts):
        lay = Layouts(f"{case.key} {dtype} {form} {number}")
        verdict, text = _run(case, seeds, known, lay, TOLERANCE.get(dtype, 0.0) if fixed else None)
        place = f"{form} {case.describe()} {dtype} {lay}"
        report.add(
            dtype, form, verdict, text and (text if verdict == "refused" else f"{place}: {text}")
        )


def _known(case: Case) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """The seeds of the backward, and what plain torch makes of a sample in two runs."""
    backward, found, seed = Backward(), [], torch.manual_seed
    for number in range(2):
        # Some samples seed the generator themselves, always alike.
        with patch("torch.manual_seed", lambda given, number=number: seed(given + number)):
            torch.manual_seed(0)
            found.append(values_and_gradients(case, [x.clone() for x in case.tensors], backward))
        backward.given = backward.seeds
    return backward.seeds, found[0], found[1]


class Layouts:
    """Lays tensors out at random, alike for equal `seed`; its text says how."""

    def __init__(self, seed: str) -> None:
        self._draw = random.Random(seed)
        self.placement = placement_of(self._draw.choice(_GRIDS))
        self._given: list[Layout] = []

    def __str__(self) -> str:
        return f"{self.placement.shape} " + ", ".join(
            "(" + ", ".join(map(str, layout.sbp)) + ")" for layout in self._given
        )

    def __call__(self, tensor: Tensor) -> Tensor:
        """A global tensor of this value."""
        if tensor.layout != torch.strided:
            raise weft.errors.UserError("sparse tensors")
        choices: list[SBP] = [Broadcast(), *map(Split, range(tensor.dim()))]
        if tensor.dtype != torch.bool:
            choices.append(Partial())
        sbp = tuple(self._draw.choice(choices) for _ in self.placement.shape)
        layout = Layout(self.placement, sbp)
        self._given.append(layout)
        parts = local_tensors(tensor, layout, len(self._given))
        by_rank = dict(zip(self.placement.ranks, parts, strict=True))
        return weft.from_local(by_rank, placement=self.placement, sbp=sbp, shape=tensor.shape)


def _run(
    case: Case,
    seeds: Sequence[Tensor],
    known: dict[str, Any],
    lay: Lay,
    tolerance: float | None,
) -> tuple[str, str]:
    """Verdict and what happened; without a tolerance values are not compared."""
    try:
        host = case.name in _HOST
        tensors = [x if host and number else lay(x) for number, x in enumerate(case.tensors)]
        found = values_and_gradients(case, tensors, Backward(given=[lay(x) for x in seeds]))
        found = {
            name: x.full() if isinstance(x, weft.GlobalTensor) else x for name, x in found.items()
        }
        return _verdict(known, found, tolerance)
    except (InternalError, RankFailure) as error:
        return "crash", f"{type(error).__name__}: {str(error)[:300]}"
    except WeftError as error:
        return "refused", reason_of(error)
    except Exception as error:  # every other error is a bug
        return "crash", f"{type(error).__name__}: {str(error)[:300]}"


def _verdict(
    known: dict[str, Any], found: dict[str, Any], tolerance: float | None
) -> tuple[str, str]:
    for name in dict.fromkeys((*known, *found)):
        problem = _difference(known.get(name), found.get(name), tolerance)
        if problem:
            return "wrong", f"{name} {problem}"
    return "right", ""


def _difference(known: Any, found: Any, tolerance: float | None) -> str:
    if isinstance(known, Tensor) and isinstance(found, Tensor):
        if known.shape != found.shape or known.dtype != found.dtype:
            return f"is {found.dtype}{list(found.shape)}, not {known.dtype}{list(known.shape)}"
        if tolerance is None or _same(
            found, known, max(tolerance, TOLERANCE.get(known.dtype, 0.0))
        ):
            return ""
        return "differs"
    for one in (known, found):  # no gradient and a gradient of zeros are the same
        if isinstance(one, Tensor):
            return "" if not one.any() else "is missing on one side"
    alike = tolerance is None or known == found or known != known
    return "" if alike else f"is {found!r}, not {known!r}"


def _same(found: Any, known: Any, tolerance: float) -> bool:
    if not isinstance(found, Tensor) or not isinstance(known, Tensor):
        return bool(found is known or found == known)
    if known.layout != torch.strided:
        return False
    plain = [x.resolve_conj().resolve_neg() for x in (found, known)]
    return close(plain[0], plain[1], tolerance)
