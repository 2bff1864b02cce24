"""Groups of ops, and signatures that are tried for them."""

from __future__ import annotations

from search.jobs import decoder, enumeration
from weft.search.signatures import groups_of, improved
from weft.strategy.strategy import data_parallel


def test_a_group_is_one_op_of_every_block() -> None:
    groups = groups_of(decoder(), enumeration(decoder(), "h100x2"))
    calls = [name for group in groups for name in group.calls]
    assert len(calls) == len(set(calls))
    # Three blocks: most groups have a call of each, those outside of blocks one.
    assert {len(group.calls) for group in groups} == {1, 3}
    assert sum(len(group.calls) == 3 for group in groups) > 20
    assert any("S(0), B -> S(0)" in group.signatures for group in groups)


def test_signatures_are_tried_and_never_make_the_best_worse() -> None:
    """Deterministic for a seed; each is that of the best but for one group."""
    names = []
    for _ in range(2):
        found = enumeration(decoder(), "flexflow-k80x4")
        found.plan("data 4", data_parallel())
        assert found.best is not None
        before = found.best[2].seconds
        planned: list[int] = []

        def told(state: object, seen: list[int] = planned, of: object = found) -> None:
            seen.append(1)
            if len(seen) == 6:
                of.budget = of.budget.__class__(0.0, 0)  # type: ignore[attr-defined]

        improved(found, decoder(), 3, told)
        assert len(planned) == 6
        assert found.best[2].seconds <= before
        names.append([each.name for each in found.result(()).tried])
    assert names[0] == names[1]
    assert sum("; " in name for name in names[0]) > 2
