"""Rules that a user declared travel with the steps that need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from planning.graph_texts import HEADER, LINEAR, write
from weft.errors import UserError
from weft.ops.call import OpCall
from weft.ops.factors import Factors, bind
from weft.ops.rule import has_rule
from weft.planning.stored_step import StoredStep, declare, rules_for

OP = "mylib.mm.default"
TEXT = LINEAR.replace("aten.mm.default", OP)
RULE = {"factors": "m k+, k n -> m n", "linear": [[0], [1]], "view": True}

pytestmark = pytest.mark.usefixtures("own_rules")


def by_function(call: OpCall) -> Factors:
    return bind("m k+, k n -> m n", call)


def test_a_rule_travels_with_its_op(tmp_path: Path) -> None:
    weft.rule(OP, "m k+, k n -> m n", linear=((0,), (1,)), view=True)
    weft.rule("mylib.other.default", "a -> a")
    ops = frozenset({OP, "aten.mm.default"})
    assert rules_for(ops) == {
        OP: {"factors": "m k+, k n -> m n", "linear": ((0,), (1,)), "view": True}
    }


def test_a_file_declares_its_rules(tmp_path: Path) -> None:
    path = write(tmp_path / "a.graph", {**HEADER, "rules": {OP: RULE}}, TEXT)
    assert not has_rule(OP)
    step = StoredStep.load(path)
    assert has_rule(OP)
    assert StoredStep.rules_of(step.graph) == {
        OP: {"factors": "m k+, k n -> m n", "linear": ((0,), (1,)), "view": True}
    }
    assert StoredStep.load(path) == step


def test_another_rule_here_is_told(tmp_path: Path) -> None:
    weft.rule(OP, "m k, k n -> m n")
    path = write(tmp_path / "a.graph", {**HEADER, "rules": {OP: RULE}}, TEXT)
    with pytest.raises(UserError, match=r"holds the rule 'm k\+, k n -> m n' of mylib.mm.default"):
        StoredStep.load(path)


def test_a_rule_in_place_of_wefts_own_travels_too(tmp_path: Path) -> None:
    assert rules_for(frozenset({"aten.mm.default"})) == {}
    path = write(tmp_path / "a.graph", {**HEADER, "rules": {"aten.mm.default": RULE}})
    StoredStep.load(path)
    assert rules_for(frozenset({"aten.mm.default"}))["aten.mm.default"]["view"] is True


def test_a_function_cannot_travel() -> None:
    weft.rule(OP, by_function)
    with pytest.raises(UserError, match=r"its field 'factors' is the function by_function"):
        rules_for(frozenset({OP}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "the rule of 'mylib.mm.default': factors must be a text, got nothing"),
        ({"factors": 1}, "factors must be a text, got 1"),
        ({"factors": "m k"}, "m k"),
        ({**RULE, "linear": [0]}, r"linear\[0\] must be a list, got 0"),
        ({**RULE, "linear": [[-1]]}, r"linear\[0\]\[0\] must be a whole number from 0, got -1"),
        ({**RULE, "view": 1}, "view must be true or false, got 1"),
        ({**RULE, "reduction": "mode"}, "reduction must be one of .*, got 'mode'"),
        ({**RULE, "flops": "x"}, "no field is named 'flops'"),
    ],
)
def test_what_is_no_rule_is_refused(content: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        declare("a", {OP: content})
