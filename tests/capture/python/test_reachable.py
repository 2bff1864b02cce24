"""Dicts that functions read only by literal keys, and modules that functions import."""

from __future__ import annotations

import json.decoder
import sys
from collections.abc import Callable
from typing import Any

import pytest

from weft.capture.python.reachable import Keys, imported_by

D: Any = {}


def used(*_: Any, **__: Any) -> Any: ...


def renamed(x: Any) -> Any:
    held = D
    return held["a"] + x.other["b"]


def renamed_and_gone_over() -> Any:
    held = D
    return list(held)


def written_and_counted() -> None:
    D["a"] += 1
    D["b"] = 2


WRITTEN: list[Callable[..., Any]] = [
    lambda: D["a"],
    lambda: D["a"]["b"] * D.get("c", 1),
    lambda: "a" in D,
    lambda x: x.D["a"],
    renamed,
    written_and_counted,
]
OPENED: list[Callable[..., Any]] = [
    lambda x: D[x],
    lambda: D["a" + str(1)],
    lambda: D.items(),
    lambda x: D.get(x),
    lambda x: x in D,
    lambda: [x + 1 for x in D],
    lambda: sum(x["a"] for x in D.values()),
    lambda: used(D),
    lambda: used(**D),
    lambda x: (D["a"], x.D.copy()),
    renamed_and_gone_over,
]


@pytest.mark.parametrize("function", WRITTEN)
def test_read_by_keys_in_the_code(function: Any) -> None:
    keys = Keys()
    keys.add(function.__code__)
    assert keys.written("D")


@pytest.mark.parametrize("function", OPENED)
def test_read_in_another_way(function: Any) -> None:
    keys = Keys()
    keys.add(function.__code__)
    assert not keys.written("D")


def test_one_function_is_enough() -> None:
    keys = Keys()
    keys.add(WRITTEN[0].__code__)
    assert keys.written("D")
    assert not keys.written("E")
    assert not keys.written(None)
    keys.add(OPENED[0].__code__)
    assert not keys.written("D")


def test_modules_that_a_function_imports() -> None:
    code = "def absolute():\n    import json.decoder\ndef relative():\n    from . import batch\n"
    space: dict[str, Any] = {"__package__": "weft.capture"}
    exec(code, space)
    assert json.decoder in imported_by(space["absolute"])
    assert sys.modules["weft.capture"] in imported_by(space["relative"])
