"""Groups of calls, and the edges between them."""

from __future__ import annotations

from math import prod

from search.jobs import decoder
from weft.search.moves.layouts import edges_of, groups_of, legal_signatures_of
from weft.search.steps.repeated import repeated_blocks
from weft.units import ITEM_SIZE


def test_a_group_is_one_op_of_every_block() -> None:
    graph, blocks = decoder().graph, repeated_blocks(decoder().modules)
    groups = groups_of(graph, blocks)
    calls = [name for group in groups for name in group.calls]
    assert len(calls) == len(set(calls))
    # Three blocks: most groups have a call of each, those outside of blocks one.
    assert {len(group.calls) for group in groups} == {1, 3}
    assert sum(len(group.calls) == 3 for group in groups) > 20
    assert [group.size for group in groups] == sorted((g.size for g in groups), reverse=True)


def test_an_edge_is_a_value_from_one_group_to_another() -> None:
    graph, blocks = decoder().graph, repeated_blocks(decoder().modules)
    groups = groups_of(graph, blocks)
    made = {value.name: value for value in graph.values.values()}
    of = {group.name: group.calls for group in groups}
    for edge in edges_of(graph, groups):
        assert edge.source != edge.target
        readers = [
            node for node in graph.nodes if node.makes and node.makes[0].name in of[edge.target]
        ]
        sources = [
            node for node in graph.nodes if node.makes and node.makes[0].name in of[edge.source]
        ]
        values = {node.makes[edge.result].name for node in sources}
        read = {reader.uses[edge.operand] for reader in readers} & values
        sizes = {prod(made[name].shape) * ITEM_SIZE[made[name].dtype] for name in read}
        assert sizes == {edge.size}


def test_signatures_are_those_of_the_rule_for_so_many_ranks() -> None:
    few, many = (legal_signatures_of(decoder().graph, parts) for parts in (2, 1024))
    assert any(str(each) == "S(0), B -> S(0)" for every in few.values() for each in every)
    assert sum(map(len, many.values())) < sum(map(len, few.values()))
