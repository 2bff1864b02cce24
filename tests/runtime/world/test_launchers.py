"""Launchers that meet for one start after the other: who takes part, in which order, and who comes too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue

import pytest

from weft.errors import UserError
from weft.runtime.world.launch import NodeProcesses
from weft.runtime.world.launchers import JoinedNode, Launchers, Nodes
from weft.runtime.world.store import NodesStore, Server

SECRET = "a secret that nobody can guess"
pytestmark = pytest.mark.timeout(60)


class Job:
    """A store, and launchers that use it."""

    def __init__(self, count: int) -> None:
        self.server = Server(("127.0.0.1", 0), SECRET.encode())
        self.nodes = Nodes(count, f"127.0.0.1:{self.server.port}", "a")
        self.clients: dict[Launchers, NodesStore] = {}

    def launcher(self) -> Launchers:
        client = NodesStore(self.nodes.address, SECRET.encode(), 5)
        found = Launchers(self.nodes, client, SECRET)
        self.clients[found] = client
        return found

    def lose(self, launcher: Launchers) -> None:
        """Its host is lost."""
        self.clients.pop(launcher).close()


@contextmanager
def job(count: int) -> Iterator[Job]:
    found = Job(count)
    yield found
    for client in found.clients.values():
        client.close()
    found.server.close()


def met(
    *launchers: tuple[Launchers, int], least: int | None = None
) -> list[tuple[NodeProcesses, int]]:
    """The fleets of launchers with so many ranks that meet for a start, and its number."""
    found: SimpleQueue[tuple[int, JoinedNode | BaseException]] = SimpleQueue()
    with ExitStack() as stack:

        def join(number: int, launcher: Launchers, ranks: int) -> None:
            try:
                found.put((number, stack.enter_context(launcher.joined(ranks, least, 20.0))))
            except BaseException as error:
                found.put((number, error))

        threads = [
            threading.Thread(target=join, args=(number, *each))
            for number, each in enumerate(launchers)
        ]
        for thread in threads:
            thread.start()
        every = dict(found.get(timeout=30) for _ in launchers)
        for thread in threads:
            thread.join(30)
        for each in every.values():
            if isinstance(each, BaseException):
                raise each
        joined = [every[number] for number in range(len(launchers))]
        return [(each.fleet, each.start) for each in joined if isinstance(each, JoinedNode)]


def test_ranks_stay_on_their_hosts_and_a_new_one_fills_the_gap() -> None:
    with job(3) as all_:
        a, b, c, d = (all_.launcher() for _ in range(4))
        fleets = dict(zip((a, b, c), met((a, 1), (b, 2), (c, 3)), strict=True))
        assert sorted(fleet.node for fleet, _ in fleets.values()) == [0, 1, 2]
        assert {fleet.world for fleet, _ in fleets.values()} == {6}
        all_.lose(b)
        assert a.again(0)
        assert c.again(0)  # it is one start all the same
        again = dict(zip((c, d, a), met((c, 3), (d, 2), (a, 1)), strict=True))
        for each in (a, c):
            assert again[each] == (fleets[each][0], 1)
        assert again[d] == (fleets[b][0], 1)


def test_with_enough_ranks_a_start_goes_on_without_those_that_have_gone() -> None:
    with job(3) as all_:
        a, b, c = (all_.launcher() for _ in range(3))
        met((a, 1), (b, 1), (c, 1))
        all_.lose(c)
        assert a.again(0)
        fleets = met((a, 1), (b, 1), least=2)
        assert {(fleet.world, fleet.nodes, start) for fleet, start in fleets} == {(2, 2, 1)}
        with pytest.raises(UserError, match="has gone on without this node, on 2 nodes"):
            met((all_.launcher(), 1))


def test_with_too_few_a_start_waits() -> None:
    with job(2) as all_:
        a, b = all_.launcher(), all_.launcher()
        met((a, 1), (b, 1))
        all_.lose(b)
        assert a.again(0)
        with pytest.raises(UserError, match="1 of 2 nodes have come"), a.joined(1, 2, 0.0):
            pass
        # Who has not gone is waited for, too.
    with job(2) as all_:
        a, b = all_.launcher(), all_.launcher()
        met((a, 1), (b, 1))
        assert a.again(0)
        with pytest.raises(UserError, match="1 of 2 nodes have come"), a.joined(1, 1, 0.0):
            pass


def test_no_start_follows_once_somebody_has_ended_the_job() -> None:
    with job(2) as all_:
        a, b = all_.launcher(), all_.launcher()
        a.finish_job()
        assert not b.again(0)
        all_.server.close()
        assert not b.again(0)


def test_a_node_that_came_and_has_gone_since_keeps_no_place() -> None:
    """Another one takes it, and a start without it does not count its ranks."""
    with job(3) as all_:
        a, b, c = (all_.launcher() for _ in range(3))
        met((a, 1), (b, 1), (c, 1))
        all_.lose(c)
        assert a.again(0)
        with pytest.raises(UserError, match="1 of 3 nodes have come"), b.joined(1, None, 0.0):
            pass
        all_.lose(b)
        fleets = met((a, 1), (all_.launcher(), 1), (all_.launcher(), 1))
        assert {(fleet.world, start) for fleet, start in fleets} == {(3, 1)}


def test_more_nodes_than_there_are_to_be_are_refused() -> None:
    with job(2) as all_:
        met((all_.launcher(), 1), (all_.launcher(), 1))
        with pytest.raises(UserError, match="2 nodes have come to .* already"):
            met((all_.launcher(), 1))


def test_who_waits_for_a_start_hears_that_the_job_was_ended() -> None:
    with job(2) as all_:
        a, b = all_.launcher(), all_.launcher()
        met((a, 1), (b, 1))
        assert a.again(0)
        b.finish_job()
        with pytest.raises(UserError, match="ended on another node"):
            met((a, 1))
