"""Local programs: their text parses back, and each rule of their table fires on the smallest program that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import InternalError, UserError
from weft.ir import parse_local, verify_local
from weft.ir.legal.tables import LOCAL_RULES

HEAD = "local program of rank 1 micro 2\n"
LOOP = "loop %part %h %s\n"
FORM = "form %s of %h\n"
INPUTS = (
    'input %w = parameter "fc.weight" : float32[4]\ninput %m = state "fc.weight.momentum" : float32[4]\n'
    'input %x = batch "x" : float32[2, 4]\n'
)
FORWARD = (
    "%part = call aten.select.int(%x, 0, vary(0, 1)) : float32[4]\n"
    "%h = call aten.mul.Tensor(%part, %w) : float32[4]\n"
)
SUM = "%s = all_reduce %h : float32[4] -> float32[4] (comm=0, reduction=sum, bytes=32)\n".replace(
    "reduction=sum", 'reduction="sum"'
)
BACKWARD = '%g, _ = call weft.accumulate(%s, "sum") : float32[4], _ {0 backward}\n'
UPDATE = 'update "SGD" group 0 "fc.weight" %w from %g states %m\n'
OUTPUT = 'output "loss" %g\n'
LEGAL = HEAD + LOOP + FORM + INPUTS + FORWARD + SUM + BACKWARD + UPDATE + OUTPUT

BROKEN = {
    "local_values_assigned_once": LEGAL.replace(SUM, SUM + SUM),
    "local_values_made_before_use": LEGAL.replace(FORWARD + SUM, SUM + FORWARD),
    "local_dtypes_known": LEGAL.replace('momentum" : float32', 'momentum" : quaternion'),
    "local_keys_unique": LEGAL.replace('state "fc.weight.momentum"', 'parameter "fc.weight"'),
    "exchanges_take_what_is_there": LEGAL.replace("%h : float32[4] ->", "%h : float32[5] ->"),
    "local_updates_write_variables": LEGAL.replace("states %m", "states %x"),
    "local_arguments_complete": LEGAL.replace("vary(0, 1)", "vary(0, 1, 2)"),
    "forms_are_made": LEGAL.replace(FORM, FORM + "form %h of %s\n"),
    "loop_complete": LEGAL.replace(LOOP, "loop %part %h\n"),
}


def test_text_parses_back_to_an_equal_program() -> None:
    program = parse_local(LEGAL)
    assert (program.rank, program.micro_batches, len(program.nodes)) == (1, 2, 5)
    assert program.loop == {"part", "h", "s"}
    assert program.origins == {"s": "h"}
    assert str(program) == LEGAL.replace("%part %h %s", "%h %part %s")
    assert parse_local(str(program)) == program


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 'local', got nothing in line 1"),
        ("local program of rank 0\nactor 0\n", "line 2"),
        (HEAD + "loop %a b\n", "unexpected 'b' in line 2"),
        (HEAD + "output 3\n", "expected a string, got '3' in line 2"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_local(text)


def test_a_legal_program_passes() -> None:
    program = parse_local(LEGAL)
    assert verify_local(program) is program
    assert program.with_nodes(list(program.nodes)) is program
    assert program.with_nodes(program.nodes[:-1]).held == set()


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_fires(rule: str) -> None:
    assert BROKEN[rule] != LEGAL
    with pytest.raises(InternalError, match=f"rank 1 breaks the rule {rule}"):
        verify_local(parse_local(BROKEN[rule]))


def test_every_rule_has_a_case() -> None:
    rules = {rule.__name__ for rule in LOCAL_RULES}
    assert rules == {*BROKEN, "local_calls_know_their_tensors"}  # which text cannot break


def test_calls_have_the_shapes_of_what_they_read() -> None:
    program = parse_local(LEGAL)
    for place, (value, *_) in enumerate(node.makes for node in program.nodes[:2]):
        nodes = list(program.nodes)
        nodes[place] = replace(nodes[place], outputs=(replace(value, shape=(5,)),))
        with pytest.raises(InternalError, match="local_calls_know_their_tensors: its results"):
            verify_local(replace(program, nodes=tuple(nodes)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("from %g", "from %part", "%part is in the loop"),
        ("%g\n", "%h\n", "%h is in the loop"),
        (LOOP, "loop %part %h %s %g\n", "%g is in the loop"),
        (LOOP, "loop %part %h %s %nowhere\n", "%nowhere breaks|nowhere made"),
        (OUTPUT, 'output "loss" %nowhere\n', "%nowhere is not made"),
        (FORM, "form %nowhere of %h\n", "%nowhere is nowhere made"),
        (OUTPUT, OUTPUT + OUTPUT, "the key 'loss' stands twice"),
        (UPDATE, UPDATE + UPDATE, "%m, %w is updated twice"),
        ("float32[4], _ {0", "float32[5], _ {0", "source and target differ in shape"),
        ("input %m", "input %w", "%w is assigned twice"),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        verify_local(parse_local(LEGAL.replace(old, new)))
