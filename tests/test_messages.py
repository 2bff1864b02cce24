"""Errors for users say what would work, or what was expected."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from weft import errors

SOURCE = Path(__file__).parents[1] / "src" / "weft"
FOR_USERS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.UserError)
}
# Words by which a message tells what to do, or what something takes.
REMEDY = re.compile(
    r"\b(expected|takes?|use|gives?|must|call|compile|pass|name|bring|make|keep|leave|write|load|close|declare|box|let|"
    r"do that|register\w*|return|start|put|add|draw|cut|wrap|rename|change|reduce|pad|copy|compute|redistribute|"
    r"broadcast|goes? with|does without|would do|is one of|an SBP is|is split or broadcast|is a full grid|reads like|"
    r"needs?|may read|can hold|remove|repair|"
    r"delete|run|capture|there are|which has|is a whole number|is true or false|a tile is|are numbered|need at least|"
    r"names two|is at named|whole groups of|on devices of one type|weft plans|the most that)\b",
    re.IGNORECASE,
)
# Parts of messages whose remedy stands in a constant, or is given by who calls.
ELSEWHERE = (
    "cannot be captured: its step on",
    "and reads it: captured once",
    "is of another model: it lacks",
    "the loss function returned",
    "the step replaces",
    "the update of",
    "the program has no place",
    " matches nothing",
    "the strategy has",
)
# A message with fewer letters of its own is made of others.
OWN_LETTERS = 24


def test_errors_for_users_name_a_remedy() -> None:
    found = list(_messages())
    assert len(found) > 150
    assert [
        f"{place}: {text}"
        for place, text in found
        if not REMEDY.search(text) and not any(part in text for part in ELSEWHERE)
    ] == []


def _messages() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="wrong"), args=[_, expected, *_]):
                    yield (
                        f"{path.relative_to(SOURCE)}:{node.lineno}",
                        f"must be {ast.unparse(expected)}",
                    )
                case ast.Call(func=ast.Name(id=name), args=[text, *_]) if name in FOR_USERS:
                    own = "…".join(
                        each.value
                        for each in ast.walk(text)
                        if isinstance(each, ast.Constant) and isinstance(each.value, str)
                    )
                    if len(re.findall(r"[a-z]", own)) >= OWN_LETTERS:
                        yield f"{path.relative_to(SOURCE)}:{node.lineno}", own
