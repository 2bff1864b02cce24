"""One script, judged: trained by weft and by plain PyTorch, every result compared."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tools.random_programs.rounding import Rounded
from tools.random_programs.training import Results, Script, alone, by_weft, plainly
from weft.errors import UserError, VerificationError

Kind = Literal["right", "sensitive", "refused", "wrong", "internal", "hang", "invalid"]
ROUNDINGS = 5  # times that the reference is rounded otherwise, where a result differs


@dataclass(frozen=True)
class Verdict:
    """What became of a case, and in one line why."""

    kind: Kind
    why: str = ""
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}\n{self.details}".strip()


def judge(script: Script) -> Verdict:
    """Run a script both ways. The reference has copies of model and optimizer made before weft sees them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judged(script)


def _judged(script: Script) -> Verdict:
    try:
        expected = _expected(script, 0.0)
    except Exception as error:
        return Verdict("invalid", _line(error), traceback.format_exc())
    try:
        found = by_weft(script, script["STRATEGY"], script["GRID"])
    except VerificationError as error:
        return Verdict("wrong", _line(error), _chain(error))
    except Exception as error:
        kind: Kind = "refused" if _refusal(error) else "internal"
        return Verdict(kind, _line(error), _chain(error))
    return _compared(script, found, expected)


def _expected(script: Script, nudge: float) -> Results:
    """What plain PyTorch makes; weft on one rank where random numbers are drawn."""
    if not script["RANDOM"]:
        return plainly(script, nudge)
    return by_weft(script, alone(script["STRATEGY"]), [0], nudge)


def _compared(script: Script, found: Results, expected: Results) -> Verdict:
    if list(found) != list(expected):
        return Verdict("wrong", "other results", f"found {list(found)}\nexpected {list(expected)}")
    limit = script["LIMIT"]
    off = {name: _distance(found[name], expected[name]) for name in expected}
    worst = {name: far for name, far in off.items() if not far <= limit}
    if not worst:
        return Verdict("right")
    details = "\n".join(f"{name}: {far:.1e}" for name, far in worst.items())
    spread = _spread(script, expected)
    beyond = {name: far for name, far in worst.items() if not far <= 30 * spread.get(name, 0.0)}
    if not beyond:
        return Verdict("sensitive", next(iter(worst)), details)
    first = next(iter(beyond))
    return Verdict("wrong", f"{first} differs by {beyond[first]:.1e}", details)


def _spread(script: Script, expected: Results) -> dict[str, float]:
    """How far results move when sums are rounded otherwise, or parameters are a little off at the beginning."""
    unit = 1e-3 if script["STRATEGY"].precision else 1e-13 if script["LIMIT"] < 1e-6 else 3e-7
    found: dict[str, float] = {}
    others = [_expected(script, unit * scale) for scale in (1.0, -1.0, 3.0)]
    if not script["RANDOM"]:
        others += _rounded(script)
    for other in others:
        for name in expected:
            found[name] = max(found.get(name, 0.0), _distance(other[name], expected[name]))
    return found


def _rounded(script: Script) -> list[Results]:
    """The reference with its sums rounded otherwise; without runs that end in an error.

    A program that decides twice by the same scores, as some routers do, may decide otherwise each time.
    """
    found = []
    for seed in range(ROUNDINGS):
        with suppress(Exception):
            found.append(plainly(script, 0.0, partial(Rounded, seed)))
    return found


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element; infinite where kinds differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, torch.zeros_like(found), found - expected).abs().max()
    finite = expected[expected.isfinite()]
    scale = max(finite.abs().max().item() if finite.numel() else 0.0, 1e-3)
    far = difference.item() / scale
    return far if far == far else float("inf")


def _refusal(error: BaseException) -> bool:
    return isinstance(error, UserError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _line(error: Exception) -> str:
    """Kind and message in one line, with the last line of weft's code where it is no refusal."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    if _refusal(error):
        return text
    last = [*_causes(error)][-1]
    frames = traceback.extract_tb(last.__traceback__)
    ours = [frame for frame in frames if "weft" in Path(frame.filename).parts]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    cause = (
        "" if last is error else f" <- {type(last).__name__}: {' '.join(str(last).split())[:300]}"
    )
    return f"{text}{cause} at {where}"


def _chain(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def cause(verdict: Verdict) -> str:
    """What verdicts of one cause have in common: the message without names and numbers."""
    text = re.sub(r"<program \d+>:\d+: .*?  ", "", verdict.why)
    text = re.sub(r"\bb\d+(\.\w+)*", "M", text)
    text = re.sub(r"\[[\d, ]*\]|\d+(\.\d+)?(e-?\d+)?", "N", text)
    return f"{verdict.kind}: {text[:160]}"
