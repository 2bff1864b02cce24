"""Plain data read by the annotations of a dataclass: units, bounds, and what each error says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from weft.errors import UserError
from weft.schema import Bounds, Key, Length, OneOf, read
from weft.units import NO_BYTES, Bytes, Seconds


class Pair(NamedTuple):
    first: int
    second: float = 0.0


@dataclass(frozen=True)
class Inner:
    name: str
    share: Annotated[float, Bounds(above=0, most=1)] = 1.0


@dataclass(frozen=True)
class Outer:
    version: Literal[1]
    wait: Annotated[Seconds, Bounds(unit=1e-6), Key("wait_microseconds")]
    size: Annotated[Bytes, Bounds(unit=2**20), Key("size_mib")] = NO_BYTES
    inner: Mapping[str, Inner] = field(default_factory=dict)
    either: Inner | Annotated[tuple[Inner, ...], Length(1, 2)] | None = None
    pairs: tuple[Pair, ...] = ()
    kinds: Mapping[Annotated[str, OneOf(("cpu", "cuda"))], bool] = field(default_factory=dict)
    order: Annotated[str, OneOf(("a", "b"))] | Annotated[int, Bounds(least=3)] = "a"
    rest: Any = None


GOOD: dict[str, Any] = {"version": 1, "wait_microseconds": 2}


def test_values_have_the_types_and_units_of_their_fields() -> None:
    content = {
        **GOOD,
        "size_mib": 1.5,
        "inner": {"x": {"name": "y"}},
        "either": [{"name": "z", "share": 1}],
        "pairs": [[1, 2]],
        "kinds": {"cpu": True},
        "order": 3,
        "rest": None,
    }
    found = read(Outer, content, "file")
    assert found == Outer(
        *(1, Seconds(2e-6), Bytes(3 << 19), {"x": Inner("y")}, (Inner("z"),)),
        *((Pair(1, 2.0),), {"cpu": True}, 3, None),
    )
    assert isinstance(found.pairs[0].second, float)
    assert read(Outer, {**GOOD, "either": {"name": "z"}}, "file").either == Inner("z")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": True}, "version must be 1, got True"),
        ({"wait_microseconds": None}, "wait_microseconds must be a number from 0, got nothing"),
        ({"wait_microseconds": 1e31}, "must be a number from 0 to 1e+30, got 1e+31"),
        ({"wait_microseconds": float("nan")}, "must be a number from 0, got nan"),
        ({"waits_microseconds": 3}, "did you mean 'wait_microseconds'?"),
        ({"inner": [1]}, "inner must be a mapping from names, got [1]"),
        ({"inner": {3: {}}}, "inner must be a mapping from names, got {3: {}}"),
        ({"inner": {"x": {}}}, "inner: x: name must be a text, got nothing"),
        ({"inner": {"x": {"name": ""}}}, "inner: x: name must be a text, got ''"),
        (
            {"inner": {"x": {"name": "y", "share": 2}}},
            "inner: x: share must be a number above 0 and at most 1, got 2",
        ),
        ({"either": []}, "either must have 1 to 2 entries, got 0"),
        ({"either": [{"name": "a"}, 3]}, "either[1] must be a mapping from names, got 3"),
        ({"pairs": [[1]]}, "pairs[0] must be [first, second], got [1]"),
        ({"pairs": [[True, 1]]}, "pairs[0]: first must be a whole number from 0, got True"),
        ({"pairs": 3}, "pairs must be a list, got 3"),
        ({"kinds": {"tpu": True}}, "kinds: no field is named 'tpu'; did you mean 'cpu'?"),
        ({"kinds": {"cpu": 1}}, "kinds: cpu must be true or false, got 1"),
        ({"order": "c"}, "order must be one of a, b, got 'c'"),
        ({"order": 2}, "order must be a whole number from 3, got 2"),
    ],
)
def test_errors_say_where_what_must_be_there_and_what_is(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        read(Outer, {**GOOD, **change}, "file")
    assert str(error.value).startswith("file: ")
    assert message in str(error.value)
