"""The best of all signatures of a small step, by trying each, is what local searches find."""

from __future__ import annotations

from random import Random

from benchmarks.search.random_searches import case_of, outcome
from benchmarks.search.truth import evaluator_of, found_by, least, plain, space_of
from search.jobs import layers
from weft.search.measures import Measures


def test_seeds_find_what_trying_everything_finds() -> None:
    space, evaluator = space_of(layers()), evaluator_of(layers(), "flexflow-k80x4")
    every = list(space.strategies())
    assert len(every) == space.size == len(set(map(str, every))) == 9
    best = least(evaluator, space)
    first = evaluator.of(plain())
    assert isinstance(first, Measures)
    assert best < first.seconds
    # Chains begin at other layouts, too, from which they reach what is not in this space.
    assert all(found_by(evaluator, seed, 30, space) <= best for seed in range(3))


def test_a_random_search_runs() -> None:
    """One of those that `benchmarks.search.random_searches` makes by the thousand."""
    assert outcome(case_of(2), Random(2)) == "ran"
