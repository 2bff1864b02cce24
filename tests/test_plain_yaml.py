"""YAML as plain data: what is read, and what is beyond the bounds; nothing takes long, nothing is run."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mutations import mutated
from weft.errors import UserError
from weft.plain_yaml import DEEPEST, LARGEST, MOST, load_yaml, read_plain_yaml

# Ten times ten times ten …: what a kilobyte can say with aliases.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


def load(text: str | bytes) -> object:
    return load_yaml(text, "a.yaml", "a list")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, f"more than {MOST} entries"),
        ("[" + "1, " * MOST + "1]", f"more than {MOST} entries"),
        ("[" * (DEEPEST + 1), f"nested more than {DEEPEST} levels"),
        ("[" * 100_000, "nested more than"),
        ("{a: " * 100_000, "nested more than"),
        ("- " * 100_000, "nested more than"),
        (" " * (LARGEST + 1), f"more than {LARGEST} bytes"),
        ("&a [*a]", "contains itself"),
        ("&a {b: {c: *a}}", "contains itself"),
        ("a: 2001-13-45", "a date, a number or a key"),
        ("a: " + "9" * 5000, "a date, a number or a key"),
        ("? [1]\n: 2", "unhashable|a date, a number or a key"),
        ("a: 1\na: 2", "stands twice"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: é".encode("latin-1"), "utf-8"),
        ("\0", "unacceptable character"),
        ("*nobody", "undefined alias|nobody"),
    ],
)
def test_what_is_no_plain_data_is_told(text: str | bytes, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=words) as caught:
        load(text)
    assert time.monotonic() - started < 20
    message = str(caught.value)
    assert message.startswith("a.yaml")
    assert message.endswith("expected a list")
    assert len(message) < 1000


def test_aliases_within_the_bounds_are_read() -> None:
    assert load("a: &x [1, 2]\nb: [*x, *x]\n") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert load("a: &x 1\nb: [*x, *x]\n") == {"a": 1, "b": [1, 1]}
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert str(load(deep)) == deep


@pytest.mark.parametrize("text", ["1:30", "010", "-010", "1:30.5", "0o7", "+1:00", "00", "1:2:3"])
def test_what_older_yaml_takes_for_other_numbers_is_text(text: str) -> None:
    for numbers in (False, True):
        assert load_yaml(text, "a.yaml", "a list", numbers=numbers) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("-7", -7), ("+12", 12), ("1_000", 1000), ("0x1F", 31), ("0b11", 3)),
        *(("1.5", 1.5), ("-010.5", -10.5), (".5", 0.5), ("1.", 1.0), ("1.0e+3", 1000.0)),
        *((".inf", math.inf), ("-.INF", -math.inf)),
    ],
)
def test_numbers(text: str, number: float) -> None:
    found = load(text)
    assert (type(found), found) == (type(number), number)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("[1, 1e-3]")
    assert read_plain_yaml(path, "a list") == [1, "1e-3"]
    assert read_plain_yaml(path, "a list", numbers=True) == [1, 0.001]
    for other in (tmp_path / "none", tmp_path, Path("a\0b")):
        with pytest.raises(UserError, match=r"cannot be read: .*; expected a list"):
            read_plain_yaml(other, "a list")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(plain)
def test_plain_data_is_read_back(content: object) -> None:
    assert load(yaml.safe_dump(content)) == content


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab01-:[]{}&*!?|>%@`#,'\" \n\t.é~", max_size=40) | st.binary(max_size=30))
def test_any_text_is_read_or_told(text: str | bytes) -> None:
    with suppress(UserError):
        load(text)


def test_texts_with_mistakes_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = f"a: !!python/object/apply:os.system ['touch {marker}']\nb: [1, 2.5, x]\nc: {{d: e}}\n"
    for broken in mutated(text, 300):
        with suppress(UserError):
            load(broken)
    assert not os.path.lexists(marker)
