"""A plan's figures beside the textbook's: within 2 %, better or worse as the table explains, or a failure."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from tools.real_sizes.explained import EXPLAINED, Explained
from tools.real_sizes.measure import Planned
from tools.real_sizes.textbook import Figures

Verdict: TypeAlias = Literal["ok", "better", "explained", "FAIL"]
TOLERANCE = 0.02


@dataclass(frozen=True)
class Check:
    """One figure of a plan.

    Attributes:
        quantity: what is compared.
        planned, textbook: both figures; bytes, operations or a number.
        verdict: "ok" within 2 %; with a sentence in the table "better" below and "explained" above; else
            "FAIL": a plan that forgets an exchange sends less, too.
        why: that sentence.
    """

    quantity: str
    planned: float
    textbook: float
    verdict: Verdict
    why: str = ""

    @property
    def ratio(self) -> float:
        """Of the plan to the textbook; 1 when both are nothing."""
        if not self.textbook:
            return 1.0 if not self.planned else float("inf")
        return self.planned / self.textbook


def checks(row: str, kind: str, found: Planned, book: Figures, beside: Planned) -> list[Check]:
    """All figures of one row.

    Args:
        row, kind: names, for the table of explanations.
        found: the plan's figures.
        book: the textbook's.
        beside: the plan with as many sequences a rank whose peak is not to be exceeded.
    """
    pairs = [
        ("bytes", found.bytes, book.bytes),
        ("work", found.work, book.work),
        ("parameters", found.parameters, book.parameters),
        ("states", found.states, book.states),
        ("exchanges", found.exchanges, book.exchanges),
        ("peak", found.peak, highest(book, beside)),
    ]
    return [_check(row, kind, *pair) for pair in pairs]


def highest(book: Figures, beside: Planned) -> float:
    """The peak of data parallel with the storage changed, and never more than that peak.

    ZeRO (1910.02054), figure 1: what lies on a rank between steps shrinks, activations stay; beside
    the shards, `gathered` bytes of parameters are whole at a time.
    """
    stored = book.parameters + book.states - beside.parameters - beside.states
    return min(beside.peak, beside.peak + stored + book.gathered)


def _check(row: str, kind: str, quantity: str, planned: float, textbook: float) -> Check:
    bare = Check(quantity, planned, textbook, "ok")
    known = explanation(row, kind, quantity, bare.ratio)
    why = known.why if known else ""
    if bare.ratio > 1 + TOLERANCE:
        return Check(quantity, planned, textbook, "explained" if known else "FAIL", why)
    # The number of exchanges and the peak are upper bounds.
    if bare.ratio < 1 - TOLERANCE and quantity not in ("exchanges", "peak"):
        return Check(quantity, planned, textbook, "better" if known else "FAIL", why)
    return bare


def explanation(row: str, kind: str, quantity: str, ratio: float) -> Explained | None:
    """The first entry of the table that is about this figure, if the deviation is within its bounds."""
    for each in EXPLAINED:
        named = fnmatchcase(row, each.row) and fnmatchcase(kind, each.kind)
        if named and each.quantity == quantity and each.least <= ratio <= each.most:
            return each
    return None
