"""The cache: results are used again for what compares equal, forgotten oldest first."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.compiler.pass_cache import PassCache, ReadInParts


@dataclass(frozen=True)
class Inner(ReadInParts):
    depth: int


@dataclass(frozen=True)
class Outer(ReadInParts):
    inner: Inner
    wide: int = 1
    table: dict[str, int] = field(default_factory=dict)


SEEN: list[int] = []


def twice(given: int) -> int:
    SEEN.append(given)
    return 2 * given


def depth(outer: Outer) -> int:
    SEEN.append(outer.inner.depth)
    return outer.inner.depth + len(outer.table)


def seen(cache: PassCache, *given: int) -> list[int]:
    """The arguments for which a result was made anew."""
    SEEN.clear()
    assert [cache.of(twice, each) for each in given] == [2 * each for each in given]
    return [*SEEN]


def test_a_result_is_made_once_for_what_is_equal() -> None:
    assert seen(PassCache(2), 1, 2, 1, 2) == [1, 2]


def test_the_result_that_was_not_used_longest_is_forgotten() -> None:
    assert seen(PassCache(2), 1, 2, 1, 3, 1, 2) == [1, 2, 3, 2]


def test_nothing_is_kept_by_default() -> None:
    assert seen(PassCache(), 1, 1) == [1, 1]


def test_calls_that_take_turns_keep_their_own() -> None:
    cache = PassCache(1)
    SEEN.clear()
    for _ in range(2):
        assert [cache.of(twice, rank, at=rank) for rank in range(3)] == [0, 2, 4]
    assert SEEN == [0, 1, 2]


def test_only_what_was_read_has_to_be_the_same() -> None:
    cache = PassCache(1)
    SEEN.clear()
    assert cache.of(depth, Outer(Inner(3), 1)) == 3
    assert cache.of(depth, Outer(Inner(3), 2)) == 3
    assert SEEN == [3]
    assert cache.of(depth, Outer(Inner(4), 1)) == 4
    assert cache.of(depth, Outer(Inner(4), 1, {"a": 1})) == 5
    assert SEEN == [3, 4, 4]
