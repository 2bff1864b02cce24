"""Kept results: used again for what compares equal, forgotten oldest first."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.compiler.context import PassCache, RecordedReads, reads_the_same


@dataclass(frozen=True)
class Inner:
    depth: int


@dataclass(frozen=True)
class Outer:
    inner: Inner
    wide: int = 1
    table: dict[str, int] = field(default_factory=dict)


def made(kept: PassCache, given: int, seen: list[int]) -> int:
    def make() -> int:
        seen.append(given)
        return 2 * given

    return kept.of("twice", (given,), make)


def test_a_result_is_made_once_for_what_is_equal() -> None:
    kept, seen = PassCache(2), list[int]()
    assert [made(kept, given, seen) for given in (1, 2, 1, 2)] == [2, 4, 2, 4]
    assert seen == [1, 2]


def test_the_result_that_was_not_used_longest_is_forgotten() -> None:
    kept, seen = PassCache(2), list[int]()
    for given in (1, 2, 1, 3, 1, 2):
        made(kept, given, seen)
    assert seen == [1, 2, 3, 2]


def test_nothing_is_kept_by_default() -> None:
    kept, seen = PassCache(), list[int]()
    made(kept, 1, seen)
    made(kept, 1, seen)
    assert seen == [1, 1]
    assert not kept.results


def test_only_what_was_read_has_to_be_the_same() -> None:
    read = RecordedReads(Outer(Inner(3), 1), Inner)
    assert (read.inner.depth, read.table) == (3, {})
    assert set(read.noted) == {("inner", "depth"), ("table",)}
    assert reads_the_same(read.noted, Outer(Inner(3), 2))
    assert not reads_the_same(read.noted, Outer(Inner(4), 1))
    assert not reads_the_same(read.noted, Outer(Inner(3), 1, {"a": 1}))
