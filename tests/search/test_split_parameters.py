"""Which families of parameters a strategy splits."""

from __future__ import annotations

from typing import Any

import weft
from search.jobs import dense, step_of
from weft.search.why_not import split_parameters

GRAPH = step_of(dense(16, 32, 32, 4), 8, 16).graph


def test_what_is_whole_is_of_no_family() -> None:
    assert split_parameters(GRAPH, weft.Strategy()) == frozenset()
    assert split_parameters(GRAPH, weft.data_parallel()) == frozenset()


def test_of_layers_the_dimension_is_no_matter() -> None:
    rows, columns = ({"0.weight": weft.split(dim)} for dim in (0, 1))
    both: Any = {"0.weight": (weft.broadcast, weft.split(0)), "2.weight": weft.split(1)}
    for parameters in (rows, columns, both):
        found = split_parameters(GRAPH, weft.Strategy(parameters=parameters))
        assert found == {("layers", 0)}


def test_of_vocabularies_it_is() -> None:
    found = [
        split_parameters(GRAPH, weft.Strategy(parameters={"4.weight": weft.split(dim)}))
        for dim in (0, 1)
    ]
    assert found == [{("vocabularies", 0)}, {("vocabularies", 1)}]


def test_patterns_count_in_their_order() -> None:
    laid: Any = {"4.*": weft.broadcast, "*": weft.split(0)}
    assert split_parameters(GRAPH, weft.Strategy(parameters=laid)) == {("layers", 0)}
