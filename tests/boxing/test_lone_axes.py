"""Chains on grids that have axes of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from weft.boxing import path, steps
from weft.boxing.overlaps import State
from weft.boxing.transfer import BoxingStep, StepKind
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split

SHAPE = (8, 6)
B, P, S0, S1 = Broadcast(), Partial("sum"), Split(0), Split(1)
ALL: tuple[SBP, ...] = (B, P, S0, S1)
SIX = tuple(range(6))


def _chain(source: Layout, target: Layout) -> tuple[BoxingStep, ...]:
    """The chain, whose steps follow each other from the one to the other."""
    found = steps(source, target, SHAPE, 4)
    here = source
    for step in found:
        assert step.source == here
        here = step.target
    assert here == target
    return found


def _moved(chain: tuple[BoxingStep, ...]) -> list[tuple[str, int]]:
    """Kinds and bytes of the steps that are no mere change of name."""
    return [(step.kind, step.bytes) for step in chain if step.kind != "reinterpret"]


@pytest.mark.parametrize("made", list(product(ALL, repeat=2)))
def test_chains_are_those_of_the_other_axes(made: tuple[SBP, SBP]) -> None:
    """On (1, 2, 1, 3) the same steps run as on (2, 3), whatever stands along the axes of one rank."""
    small, large = Placement("cpu", (2, 3), SIX), Placement("cpu", (1, 2, 1, 3), SIX)
    for wanted, (one, other) in product(product(ALL, repeat=2), ((B, P), (S0, S1), (P, B))):
        plain = _chain(Layout(small, made), Layout(small, wanted))
        source = Layout(large, (one, made[0], other, made[1]))
        chain = _chain(source, Layout(large, (other, wanted[0], one, wanted[1])))
        assert _moved(chain) == _moved(plain)
        axes = [{1: 0, 3: 1, -1: -1}[step.axis] for step in chain if step.kind != "reinterpret"]
        assert axes == [step.axis for step in plain if step.kind != "reinterpret"]


@pytest.mark.parametrize("target", [(2, 3), (3, 1, 2), (6, 1), (1, 6)])
@pytest.mark.parametrize("ranks", [SIX, (6, 7, 8, 9, 10, 11)])
def test_chains_between_placements(target: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    """A transfer is of no Partial, along axes of one rank neither."""
    here, there = Placement("cpu", (1, 6, 1), SIX), Placement("cpu", target, ranks)
    for made in product((B, P, S0), repeat=3):
        for wanted in product((B, P, S1), repeat=len(target)):
            chain = _chain(Layout(here, made), Layout(there, wanted))
            for step in chain:
                if step.kind == "transfer":
                    assert not any(isinstance(sbp, Partial) for sbp in step.source.sbp)
                    assert not any(isinstance(sbp, Partial) for sbp in step.target.sbp)


def test_many_axes_of_one_rank_make_no_larger_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layouts that a search looks at are those of axes of several ranks."""
    seen: list[int] = []
    plain = path.changes

    def counted(
        state: State, grid: tuple[int, ...], options: State
    ) -> Iterator[tuple[StepKind, int, State]]:
        seen.append(len(grid))
        return plain(state, grid, options)

    monkeypatch.setattr(path, "changes", counted)
    place = Placement("cpu", (1, 1, 5, 1, 1, 1, 1, 1), (0, 1, 2, 3, 4))
    chain = _chain(Layout(place, (S0,) * 8), Layout(place, (S1,) * 8))
    assert set(seen) == {1}
    assert len(chain) == 8
