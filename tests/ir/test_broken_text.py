"""Texts of graphs, plans and local programs with mistakes: they are read, or the line is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mutations import mutated
from weft.errors import UserError
from weft.ir.parse import parse_graph, parse_local, parse_plan

GOLDEN = Path(__file__).parents[1] / "compiler" / "golden"
# The first words of each kind of text.
PARSERS: dict[str, Callable[[str], object]] = {
    "graph ": parse_graph,
    "plan ": parse_plan,
    "local program ": parse_local,
}
PLAN = """plan "tiny"
communicator 0 = [0, 1]
rank 0 micro 2
input %x = batch "x" : float32[4, 2]
order "comm:0" [[1, 0], [1, 1]]
"""


def texts(path: Path) -> Iterator[tuple[Callable[[str], object], str]]:
    """The graphs and programs that stand in a file of passes before and after, as far as each can be read."""
    lines = path.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(tuple(PARSERS))]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = "\n".join(lines[start:end]).partition("\n---")[0]
        parse = next(PARSERS[head] for head in PARSERS if text.startswith(head))
        yield parse, text


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_texts_with_mistakes_are_read_or_told(path: Path) -> None:
    for parse, text in texts(path):
        for broken in mutated(text, 20):
            with suppress(UserError):  # all else fails the test
                parse(broken)


def test_plans_with_mistakes_are_read_or_told() -> None:
    parse_plan(PLAN)
    for broken in mutated(PLAN, 400):
        with suppress(UserError):
            parse_plan(broken)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("placement @0 = cpu " + "[" * 5000, "more than 50 levels deep"),
        (f"%x = call f({'[' * 60}{']' * 60}) : f[]", "more than 50 levels deep"),
        (f'%x = batch "x" : float32[{"9" * 5000}]', "line 2"),
        ('%x = batch "\\u" : float32[2]', "line 2"),
        ('%x = batch "x" shares 1 [1] 2 : float32[2] @3(B)', "line 2"),
    ],
)
def test_what_is_beyond_the_bounds_is_told_with_its_line(line: str, words: str) -> None:
    with pytest.raises(UserError, match="line 2") as caught:
        parse_graph(f'graph "g"\n{line}')
    assert words in str(caught.value)
    assert len(str(caught.value)) < 700  # the line is as long as it likes
