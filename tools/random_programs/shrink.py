"""A failing case with as little in it as fails alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tools.random_programs.cases import Case, simpler
from tools.random_programs.judge import Verdict, cause

TRIES = 60


def shrink(
    case: Case, verdict: Verdict, judged: Callable[[Case], Verdict], tries: int = TRIES
) -> tuple[Case, Verdict]:
    """The simplest case found that has the same kind of verdict, and for errors the same message."""
    kept = _wanted(verdict)
    again = True
    while again:
        again = False
        for each in simpler(case):
            if each == case or tries <= 0:
                continue
            tries -= 1
            found = judged(each)
            if _wanted(found) == kept:
                case, verdict, again = each, found, True
                break
    return replace(case), verdict


def _wanted(verdict: Verdict) -> str:
    """Errors are alike by their messages, wrong results by being wrong."""
    return verdict.kind if verdict.kind in ("wrong", "hang") else cause(verdict)[:70]
