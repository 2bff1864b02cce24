"""The ring of hosts, and which files travel between them."""

from __future__ import annotations

import pytest

from weft.errors import DamagedCheckpoint
from weft.program.saving.memory.generations import Generation, moves_of
from weft.program.saving.memory.hosts import Hosts
from weft.program.saving.memory.places import HeldPart


@pytest.mark.parametrize("names", ["aabb", "abab", "aaab", "abbcccc", "abcd"])
def test_every_copy_lies_on_another_host(names: str) -> None:
    hosts = Hosts(tuple(names))
    assert hosts.buddies.keys() == set(range(len(names)))
    for process, buddy in hosts.buddies.items():
        assert names[process] != names[buddy]
        assert process in hosts.copied_to(buddy)
    copied = [hosts.copied_to(process) for process in range(len(names))]
    assert sorted(each for some in copied for each in some) == list(range(len(names)))
    # Work is shared: of a host's processes none has two copies more than another one.
    for members in hosts.members.values():
        counts = [len(copied[process]) for process in members]
        assert max(counts) - min(counts) <= 1


def test_on_one_host_there_are_no_buddies() -> None:
    hosts = Hosts(("a", "a"))
    assert (hosts.buddies, hosts.copied_to(0), hosts.firsts) == ({}, (), (0,))
    assert hosts.first(1) == 0


def _part(process: int) -> HeldPart:
    return HeldPart(1, 0, 7, process, 3, True, {f"shard-{process}": 10 + process})


def test_a_host_gets_what_it_lacks_from_one_that_has_it() -> None:
    """Three hosts had a part each, and a copy of the one before; the one that had parts 1 and 0 is a new one."""
    held = {0: {0: _part(0), 2: _part(2)}, 1: {}, 2: {2: _part(2), 1: _part(1)}}
    generation = Generation(7, 1, 0, 3, held)
    assert generation.lacking == []
    members = {0: (0,), 1: (1,), 2: (2,)}
    wanted = {0: {"shard-0"}, 1: {"shard-1"}, 2: {"shard-2"}}
    assert moves_of(generation, wanted, members, {}) == [("shard-1", 1, 11, 2, 1)]
    every = {"shard-0", "shard-1", "shard-2"}
    moves = moves_of(generation, dict.fromkeys((0, 1, 2), every), members, {})
    assert {(each.file, each.receiver) for each in moves} == {
        ("shard-1", 0),
        *((file, 1) for file in every),
        ("shard-0", 2),
    }
    for move in moves:
        assert move.file in generation.files(move.sender)
    # Of shard 2 host 0 has a copy, of shard 0 nobody has.
    (move,) = moves_of(generation, {2: {"shard-2"}}, members, {2: {"shard-2"}})
    assert (move.sender, move.receiver) == (0, 2)
    with pytest.raises(DamagedCheckpoint, match="no host has shard-0 of the snapshot of step 7"):
        moves_of(generation, {0: {"shard-0"}}, members, {0: {"shard-0"}})
    lost = Generation(7, 1, 0, 3, {0: {0: _part(0)}, 2: {2: _part(2)}})
    assert lost.lacking == [1]
