"""The work of a step on one device and on several, and of pipelines that wait for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import weft
from search.jobs import begun, decoder, layers
from search.machines import TWO_KINDS
from weft.hardware.topology import Topology
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.shared_work import SharedWork, StepWork
from weft.units import Bytes

SHARP: Any = {"rel": 1e-9}


@cache
def work(topology: str | Topology = "h100x4", blocks: int = 0) -> SharedWork:
    """Of two layers, or of a decoder of so many blocks."""
    return begun(decoder(blocks) if blocks else layers(), topology).lower_bounds.work


def busy(found: SharedWork, *candidates: Candidate, least: bool = False) -> list[float]:
    return list(map(float, found.busy(CandidateTable.of(candidates), least)))


def chain(found: SharedWork, *candidates: Candidate) -> list[float]:
    return list(map(float, found.chain(CandidateTable.of(candidates))))


def test_a_line_goes_through_both() -> None:
    one, two = StepWork(*range(7)), StepWork(*range(1, 8))
    assert one.along(two, 0.0) == one
    assert one.along(two, 1.0) == two
    assert one.along(two, 5.0) == StepWork(*range(5, 12))


def test_blocks_of_the_whole_stand_on_a_line_through_few() -> None:
    """Each adds as much; what is in none of them stays."""
    few, some, more = (work(blocks=count).of_kind[0] for count in (8, 9, 10))
    for name in ("calls", "starts", "again", "all_again", "forward"):
        first, second, third = (getattr(each, name) for each in (few, some, more))
        assert 0 < second - first == pytest.approx(third - second, **SHARP), name
    assert few.losses == pytest.approx(more.losses, **SHARP)
    assert 0 < work(blocks=10).outside < work(blocks=8).outside < 1
    assert work().outside == 0.0


def test_equal_ranks_share_all_but_starts() -> None:
    found = work()
    whole = found.of_kind[0]
    expected = [whole.calls / ranks + whole.starts + whole.update / ranks for ranks in (1, 2, 4)]
    candidates = Candidate(1), Candidate(2), Candidate(2, 2, layouts="columns")
    assert busy(found, *candidates) == pytest.approx(expected, **SHARP)


def test_products_start_in_each_micro_batch_and_stages_share_them() -> None:
    found = work()
    starts = found.of_kind[0].starts
    one, four, staged = busy(
        found, Candidate(4), Candidate(4, micro_batches=4), Candidate(2, stages=2, micro_batches=4)
    )
    assert four - one == pytest.approx(3 * starts, **SHARP)
    assert four - staged == pytest.approx(2 * starts, **SHARP)


def test_quick_ranks_do_more() -> None:
    """Two kinds, of which each does as much as it can in the same time."""
    found = work(TWO_KINDS, 3)
    quick, slow = found.of_kind[0], found.of_kind[2]
    assert quick.calls < slow.calls
    calls = 1 / (2 / quick.calls + 2 / slow.calls)
    update = 1 / (2 / quick.update + 2 / slow.update)
    starts = min(quick.starts, slow.starts)
    first, every = busy(found, Candidate(2), Candidate(4))
    assert first == pytest.approx(quick.calls / 2 + quick.starts + quick.update / 2, **SHARP)
    assert every == pytest.approx(calls + starts + update, **SHARP)


def test_products_are_no_slower_than_in_a_large_one() -> None:
    """Alone a small product is far from the peak of a device; as a piece of all work it counts as if it were not."""
    found = work()
    alone = sum(
        count * found.facts.machine.costs.of_call(0, each.call).seconds
        for each, count in found.facts.calls[0].items()
    )
    assert found.of_kind[0].calls + found.of_kind[0].starts < alone


def test_of_what_runs_again_floors_count_products() -> None:
    found = work(blocks=8)
    kept, half, every = (Candidate(2, recompute=count) for count in (0, 4, 8))
    for least in (True, False):
        none, some, most = busy(found, kept, half, every, least=least)
        assert some - none == pytest.approx((most - none) / 2, **SHARP)
        again = found.of_kind[0].again if least else found.of_kind[0].all_again
        assert most - none == pytest.approx(again / 2, **SHARP)
    assert 0 < found.of_kind[0].again < found.of_kind[0].all_again


def test_cross_entropies_count_where_classes_stay_whole() -> None:
    """At least, what a plan may split takes nothing; what data parallel may not does."""
    found = work()
    cut, data = Candidate(2, 2, layouts="columns"), Candidate(4)
    losses = found.of_kind[0].losses / 4
    assert losses > 0
    assert busy(found, data, least=True) == pytest.approx(busy(found, data), **SHARP)
    assert busy(found, cut)[0] - busy(found, cut, least=True)[0] == pytest.approx(losses, rel=1e-5)
    split = weft.Strategy(parameters={"2.weight": weft.split(0)})
    laid = begun(layers(), "h100x4", base=split).lower_bounds.work
    assert busy(laid, data)[0] - busy(laid, data, least=True)[0] == pytest.approx(losses, rel=1e-5)


def test_whole_updates_are_made_by_all() -> None:
    """Along the data axis, but for those that ZeRO shards."""
    found = work()
    candidates = CandidateTable.of(
        (Candidate(4), Candidate(2), Candidate(4, zero=1), Candidate(1, 4, layouts="columns"))
    )
    update = found.of_kind[0].update
    expected = [update * 3 / 4, update / 2, 0.0, 0.0]
    assert found.updates_again(candidates).tolist() == pytest.approx(expected, **SHARP)


def test_only_stages_wait_for_one_another() -> None:
    found = work(blocks=8)
    staged = Candidate(1, stages=4, micro_batches=4, schedule="1f1b")
    in_turns = replace(staged, stages=2, turns=2, schedule="interleaved")
    flat, turns, some = chain(found, Candidate(4), in_turns, staged)
    assert flat == turns == 0.0
    assert some > 0
    # On unlike devices, the last stage may have the slow ones and little work.
    assert chain(work(TWO_KINDS, blocks=8), staged) == [0.0]


@pytest.mark.parametrize("schedule", ["", "gpipe", "1f1b", "zero_bubble"])
def test_many_micro_batches_shorten_the_chain_to_the_work(schedule: str) -> None:
    found = work(blocks=8)
    candidates = [
        Candidate(1, stages=4, micro_batches=m, schedule=schedule) for m in (1, 2, 4, 1024)
    ]
    took, calls = chain(found, *candidates), found.of_kind[0].calls / 4
    assert took == sorted(took, reverse=True)
    assert len(set(took)) == 4
    assert took[-1] == pytest.approx(calls, rel=0.01)


def test_one_micro_batch_waits_for_the_stages_before() -> None:
    """All of what they wait for: six tenths of the step, where backwards take turns with forwards."""
    found = work(blocks=8)
    (took,) = chain(found, Candidate(1, stages=4, schedule="1f1b"))
    assert took == pytest.approx(0.6 * found.of_kind[0].calls, **SHARP)
    (forward,) = chain(found, Candidate(1, stages=4))
    assert 0 < forward < took


def test_bytes_go_to_the_host_at_its_rate() -> None:
    small, large = (work().to_host(Bytes(size)) for size in (10**8, 10**9))
    assert 5 < large / small < 10.1
