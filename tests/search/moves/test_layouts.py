"""Moves of layouts: every legal one, each a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import weft
from search.jobs import decoder, layers
from weft.search.moves.layouts import GroupEdge, LayoutMoves
from weft.search.steps.repeated import repeated_blocks
from weft.strategy.strategy import Strategy, data_parallel
from weft.strategy.text import signature_sides


def moves(base: Strategy = Strategy(), grid: tuple[int, ...] = (2,)) -> LayoutMoves:  # noqa: B008 (frozen)
    return LayoutMoves(decoder(), repeated_blocks(decoder().modules), grid, base)


def test_moves_give_a_group_each_signature_and_take_it_away() -> None:
    found, start = moves(), data_parallel()
    group = next(each for each in found.groups if len(each.calls) == 3)
    own = [each for each in found.groupwise if each.name.startswith(f"{group.name} ")]
    assert len(own) == 1 + len(list(found.signatures(group.name)))
    strategy = own[1].on(start)
    assert set(strategy.signatures) == set(group.calls)
    assert own[0].on(strategy) == start
    assert found.groupwise[0].on(strategy) == start
    single = next(each for each in found.single if each.name.startswith(f"only {group.calls[1]} "))
    assert set(single.on(start).signatures) <= {group.calls[1]}


def test_along_two_axes_every_pair_of_signatures_is_there() -> None:
    one, two = moves(), moves(grid=(2, 2))
    name = one.groups[0].name
    assert len(list(two.signatures(name))) == len(list(one.signatures(name))) ** 2
    # Along an axis of one rank all are the same.
    assert len(list(moves(grid=(2, 1)).signatures(name))) == len(list(one.signatures(name)))


def test_every_single_call_has_its_signatures_in_the_order_of_the_group() -> None:
    found = moves(grid=(2, 2))
    group = next(each for each in found.groups if len(each.calls) == 3)
    own, call = found.groupwise, group.calls[1]
    texts = [
        each.name.removeprefix(f"{group.name} ")
        for each in own
        if each.name.startswith(f"{group.name} ")
    ]
    single = [each.name for each in found.single if each.name.startswith(f"only {call} ")]
    assert single == [f"only {call} {text}" for text in texts]
    assert texts[1:] == [" | ".join(map(str, each)) for each in found.signatures(call)]


def test_both_ends_of_an_edge_agree_on_what_goes_along_it() -> None:
    found, random = moves(), Random(0)
    calls = {group.name: group.calls for group in found.groups}
    drawn = [move for _ in range(20) if (move := found.drawn_along_edge(random)) is not None]
    assert len(drawn) > 10
    for move in drawn:
        signed = move.on(data_parallel()).signatures
        ends = [each for each in found.edges if signed.keys() == ends_of(each, calls)]
        # Of two edges, there and back, one was drawn.
        assert any(made_and_read(edge, signed) for edge in ends)


def ends_of(edge: GroupEdge, calls: Mapping[str, Sequence[str]]) -> set[str]:
    """The calls of both ends of an edge."""
    return {*calls[edge.source], *calls[edge.target]}


def made_and_read(edge: GroupEdge, signed: Mapping[str, object]) -> bool:
    """True where what goes along an edge is made as it is read."""
    _, results = signature_sides(str(signed[edge.source]))
    operands, _ = signature_sides(str(signed[edge.target]))
    return results[edge.result] == operands[edge.operand]


def test_tensors_of_all_blocks_and_single_ones() -> None:
    start = data_parallel()
    names = {each.name: each for each in moves().tensors}
    pattern = next(name for name in names if "*." in name and name.endswith("weight S(0)"))
    found = names[pattern].on(start)
    assert list(found.parameters)[-1] == "*"
    assert found.parameters[pattern.rpartition(" ")[0]] == weft.split(0)
    assert any(".1." in name for name in names)
    assert names["* B"].on(start).batch == {"*": weft.broadcast}


def test_what_is_fixed_has_no_moves_and_stays_first() -> None:
    fixed = Strategy(parameters={"0.weight": weft.broadcast}, signatures={"relu": "B -> B"})
    found = LayoutMoves(layers(), None, (2,), fixed)
    assert not any(each.name.startswith(("0.weight ", "relu ")) for each in found.tensors)
    assert all("relu" not in group.calls for group in found.groups)
    start = Strategy(
        parameters={**fixed.parameters, "*": weft.split(0)}, signatures=fixed.signatures
    )
    for move in (*found.tensors, *found.groupwise):
        other = move.on(start)
        assert other.signatures["relu"] == "B -> B"
        assert next(iter(other.parameters.items())) == ("0.weight", weft.broadcast)


def test_the_largest_parameters_move_first_and_deduction_last() -> None:
    names = [each.name for each in LayoutMoves(layers(), None, (2,), Strategy()).tensors]
    said = [name.rpartition(" ")[0] for name in names if not name.endswith("deduced")]
    assert list(dict.fromkeys(said))[:4] == ["0.weight", "2.weight", "0.bias", "2.bias"]
    deduced = [name.endswith("deduced") for name in names]
    assert deduced == sorted(deduced)
    assert any(deduced)
