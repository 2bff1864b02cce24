"""The terms by which a strategy loses, in words."""

from __future__ import annotations

from weft.search.evaluation.measures import Measures
from weft.units import Bytes


def too_much(memory: Bytes, limit: int | None) -> str:
    """Memory that is lacking, in words; "" where it suffices."""
    fits = limit is None or memory <= limit
    return "" if fits else f"{(memory - (limit or 0)) / 1e9:.2f} GB too much"


def loses_by(found: Measures, best: Measures) -> str:
    """The term that loses most against the best, in words."""
    terms = {
        "computing": found.computing - best.computing,
        "exchanges that nothing hides": found.exposed - best.exposed,
        "waiting": found.idle - best.idle,
    }
    term = max(terms, key=lambda each: terms[each])
    return f"{1e3 * terms[term]:.3f} ms more {term}"
