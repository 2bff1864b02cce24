"""Blocks that come again are the largest family of numbered modules, one after another."""

from __future__ import annotations

import pytest

from search.jobs import decoder, layers
from weft.ir import LogicalGraph
from weft.ir.logical import Call
from weft.search.steps.repeated import Blocks, ops_in, repeated_blocks, spans_of

BLOCKS = Blocks("net.blocks", 3)


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("net.blocks.0", 0),
        ("net.blocks.2.up.weight", 2),
        ("net.blocks.3", None),
        ("net.blocks", None),
        ("net.blocks.up", None),
        ("blocks.1", None),
        ("", None),
    ],
)
def test_a_path_is_in_one_of_them_or_outside(path: str, number: int | None) -> None:
    assert BLOCKS.of(path) == number


def test_each_has_a_path() -> None:
    assert [BLOCKS.of(BLOCKS.path(number)) for number in range(3)] == [0, 1, 2]


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number}" for number in range(count)]


def test_the_largest_family_is_taken_and_of_equal_ones_the_outermost() -> None:
    inner = [path for one in numbered("blocks", 3) for path in numbered(f"{one}.heads", 3)]
    assert repeated_blocks([*inner, *numbered("blocks", 3)]) == Blocks("blocks", 3)
    larger = numbered("blocks.0.heads", 4)
    assert repeated_blocks([*larger, *numbered("blocks", 3)]) == Blocks("blocks.0.heads", 4)


def test_numbers_have_no_gaps_and_there_are_two_at_least() -> None:
    assert repeated_blocks(numbered("blocks", 1)) is None
    assert repeated_blocks(["blocks.0", "blocks.2", "head"]) is None
    # Numbers of a model that is a sequence itself have no path before them.
    assert repeated_blocks(["0", "1", "2"]) is None


def test_spans_hold_the_calls_of_their_blocks_and_the_backward_turns() -> None:
    step = decoder()
    blocks = Blocks("blocks", 3)
    spans = spans_of(step.graph, blocks)
    assert spans is not None
    for number in range(3):
        for span in (spans.forward[number], spans.backward[number]):
            assert numbers_of(step.graph, blocks, span) == {number}
    assert [span.start for span in spans.forward] == sorted(span.start for span in spans.forward)
    starts = [span.start for span in spans.backward]
    assert starts == sorted(starts, reverse=True)
    assert spans.forward[-1].stop < spans.backward[-1].start
    one, two, _ = (ops_in(step.graph, span) for span in spans.forward)
    assert one == two
    assert len(one) == len(spans.forward[0])


def numbers_of(graph: LogicalGraph, blocks: Blocks, span: range) -> set[int]:
    """The numbers of the blocks that calls of a stretch are in."""
    calls = (graph.nodes[place] for place in span)
    modules = (call.location.module for call in calls if isinstance(call, Call) and call.location)
    return {number for module in modules if (number := blocks.of(module)) is not None}


def test_blocks_that_are_not_there_have_no_spans() -> None:
    assert spans_of(layers().graph, Blocks("blocks", 2)) is None
    assert spans_of(decoder().graph, Blocks("blocks", 4)) is None
