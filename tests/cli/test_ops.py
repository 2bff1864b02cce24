"""The command `weft ops`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from weft.cli.main import app
from weft.ops import registered_ops


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ops", *arguments])
    return result.exit_code, result.output


def test_all_ops_are_listed_with_their_rules() -> None:
    code, text = run()
    lines = text.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == list(registered_ops())
    assert any(
        line.split() == ["aten.mm.default", *["m", "k+,", "k", "n", "->", "m", "n"]]
        for line in lines
    )


def test_one_op_shows_its_signatures() -> None:
    code, text = run("aten.mm.default", "float32[8,4]", "[4,6]")
    assert code == 0
    assert text.splitlines() == [
        "aten.mm.default: m k+, k n -> m n",
        "makes float32[8, 6]; signatures along an axis of 2 ranks:",
        "  B, B -> B",
        "  S(0), B -> S(0)",
        "  B, S(1) -> S(1)",
        "  S(1), S(0) -> P(sum)",
        "  P(sum), B -> P(sum)",
        "  B, P(sum) -> P(sum)",
    ]


def test_an_op_without_a_rule_runs_whole_or_is_refused() -> None:
    assert "whole" in run("aten.linalg_eigvals.default")[1]
    code, text = run("aten.rand.default")
    assert code == 2
    assert "no sharding rule" in text
    assert "lists, such as aten.mm.default, or" in run("mm")[1]


def test_bad_arguments_are_told() -> None:
    code, text = run("aten.mm.default", "[8,4]", "[5,6]")
    assert code == 2
    assert "does not run on these arguments" in text
    assert "cannot read the argument" in run("aten.mm.default", "[8,")[1]
    code, text = run("aten.mm")
    assert (code, "names no overload of the op; give one, such as aten.mm.default" in text) == (
        2,
        True,
    )


def test_what_torch_says_is_one_line() -> None:
    """Its errors go on for pages of frames; and nobody waits for gigabytes of zeros."""
    code, text = run("aten.mm.default", "float32[99999999999999999999,4]", "[4,6]")
    assert (code, len(text.splitlines())) == (2, 2)
    assert "more than 67108864 elements" in text
    code, text = run("aten.sum.dim_IntList", "[4,4]", "[5]")
    assert (code, len(text.splitlines())) == (2, 2)


@pytest.mark.parametrize(
    "argument",
    ["{[]}", "[{[]}]", "(" * 5000, "[" * 5000, "1-" * 9000 + "1", "9" * 5000, "\0", "[1]*2"],
)
def test_arguments_that_are_no_literals_are_told(argument: str) -> None:
    code, text = run("aten.mm.default", "[8,4]", argument)
    assert code == 2
    assert "cannot read the argument" in text


@pytest.mark.parametrize("tensor", ["float99[8,4]", "abs[8,4]", "[-8,4]", "['a',4]"])
def test_tensors_that_torch_does_not_make_are_told(tensor: str) -> None:
    code, text = run("aten.mm.default", tensor, "[4,6]")
    assert code == 2
    assert "give those of a call that torch runs" in " ".join(text.split())
