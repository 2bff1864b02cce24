"""Estimates: the roofline of candidates, what measures of others make of it, and which candidates should have room."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from search.jobs import begun, decoder, layers, planned
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.estimate import Estimates, roofline
from weft.search.measures import Measures, Unplannable
from weft.search.record import Learned, Probe
from weft.search.space import space_of
from weft.search.state import SearchState
from weft.search.tuning import LIKELY
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

SHARDED = Candidate(2, zero=3)
AGAIN = replace(SHARDED, recompute=8)
NOTHING = Seconds(0.0), Seconds(0.0)
PIPE = Candidate(1, stages=2, micro_batches=4, schedule="1f1b")


@cache
def reserve() -> int:
    """What devices keep for themselves."""
    return begun(decoder(8), "h100x2").lower_bounds.reserve


def estimates(limit: int | None = None, topology: str = "h100x2") -> Estimates:
    """The estimates of a search of eight blocks, under a limit of bytes beside what devices reserve."""
    return begun(decoder(8), topology, None if limit is None else reserve() + limit).estimates


def seconds(found: Estimates, *candidates: Candidate) -> list[float]:
    return [float(found.about(each)[0]) for each in candidates]


def measured(seconds: float, memory: float) -> Measures:
    return Measures(Seconds(seconds), Bytes(int(memory)), *NOTHING)


def test_a_roofline_is_above_its_floor_and_counts_for_many_points_as_for_one() -> None:
    search = begun(decoder(4), "h100x4")
    candidates = space_of(search.facts, every_rank=False)
    every = roofline(candidates, search.lower_bounds)
    plain = ~candidates.laid("free") & (candidates.recompute + candidates.offload == 0)
    assert (every.seconds[plain] >= 0.99 * search.lower_bounds.least(candidates)[plain]).all()
    assert (every.beside >= 0).all()
    for number in range(0, len(candidates), len(candidates) // 20):
        one = roofline(CandidateTable.of([candidates.candidate(number)]), search.lower_bounds)
        assert one.seconds[0] == every.seconds[number]
        assert one.beside[0] == pytest.approx(every.beside[number])


def test_what_takes_longer_by_its_roofline_takes_longer_when_it_is_planned() -> None:
    """Of data parallel, layers cut, stages and shards, where each is twice as far apart as estimates err."""
    search = begun(layers(), "flexflow-k80x4")
    candidates = (
        Candidate(4),
        Candidate(1),
        Candidate(4, zero=3),
        Candidate(2, 2, layouts="columns"),
        Candidate(2),
    )
    found = [
        (search.estimates.about(each)[0], planned(search, each).seconds) for each in candidates
    ]
    for one in found:
        for other in found:
            assert one[0] < 2 * other[0] or one[1] > other[1]


def test_the_nearest_point_that_was_measured_counts() -> None:
    found = estimates(topology="h100x4")
    flat, cut, pipe = (
        Candidate(4),
        Candidate(2, 2, layouts="columns"),
        replace(PIPE, data=2, micro_batches=2),
    )
    before = seconds(found, flat, cut, pipe)
    found.learn(flat, measured(3 * before[0], reserve()))
    assert seconds(found, flat, cut, pipe) == pytest.approx([3 * each for each in before])
    found.learn(cut, measured(5 * before[1], reserve()))
    assert seconds(found, flat, cut, pipe) == pytest.approx(
        [3 * before[0], 5 * before[1], 3 * before[2]]
    )
    found.learn(pipe, measured(7 * before[2], reserve()))
    other = replace(pipe, micro_batches=1)
    plain = seconds(estimates(topology="h100x4"), other)[0]
    assert seconds(found, flat, pipe, other) == pytest.approx(
        [3 * before[0], 7 * before[2], 7 * plain]
    )


def test_of_equally_near_ones_the_latest_counts() -> None:
    found = estimates()
    found.learn(SHARDED, measured(1.0, reserve()))
    found.learn(SHARDED, measured(2.0, reserve() + 1000))
    assert seconds(found, SHARDED) == pytest.approx([2.0])


def test_samples_are_near_by_their_quotient() -> None:
    """Small micro-batches take longer than by their roofline; the fewer samples, the more so."""
    found, plain = estimates(), estimates()
    many, few = Candidate(1), Candidate(1, micro_batches=4)
    for candidate, times in ((many, 2.0), (few, 9.0)):
        found.learn(candidate, measured(times * seconds(plain, candidate)[0], reserve()))
    middle = Candidate(1, micro_batches=2)
    assert seconds(found, middle)[0] / seconds(plain, middle)[0] == pytest.approx(9.0)


def test_those_like_one_that_is_refused_wait() -> None:
    refused, other = Candidate(1, 2, layouts="columns"), Candidate(1, 2, layouts="sequence")
    before = estimates()
    after = begun(decoder(8), "h100x2").estimates
    after.learn(refused, Unplannable("not so"))
    after.learn(Candidate(2), Unplannable("of memory alone"))
    alike = replace(refused, micro_batches=2)
    for one, two in zip(*(seconds(e, alike, Candidate(2)) for e in (after, before)), strict=True):
        assert one == 2 * two
    after.learn(Candidate(2), measured(1.0, reserve()))
    assert seconds(after, Candidate(2)) == pytest.approx([1.0])
    assert seconds(after, alike)[0] == 2 * seconds(before, alike)[0]
    assert seconds(after, other)[0] > 0


def test_a_pipeline_stands_by_its_point_without_stages() -> None:
    """To a few hundredths of what its plan takes, once that was looked at."""
    search = begun(decoder(8), "h100x2")
    for schedule in ("gpipe", "1f1b", "zero_bubble", ""):
        candidate = replace(PIPE, schedule=schedule)
        assert not search.estimates.probed(replace(candidate, micro_batches=2))
        search.estimates.look(candidate)
        assert search.estimates.probed(candidate)
        found, whole = search.estimates.measures(candidate), planned(search, candidate)
        assert found is not None
        assert found.seconds == pytest.approx(whole.seconds, rel=0.15)
        assert found.memory - reserve() == pytest.approx(whole.memory - reserve(), rel=0.15)
    assert len(search.estimates.looks) == 1


def test_a_point_that_was_looked_at_has_the_measures_of_its_look() -> None:
    found = estimates()
    assert found.measures(SHARDED) is None
    found.look(SHARDED)
    look = found.looks[SHARDED].answer
    assert isinstance(look, Measures)
    assert found.measures(SHARDED) == replace(look, parts=())
    seconds, memory = found.about(SHARDED)
    assert seconds == pytest.approx(look.seconds)
    assert memory == pytest.approx(look.memory, abs=2)


def test_as_few_blocks_run_again_as_give_room() -> None:
    """By looks at none and at all; and the plan of them has room."""
    free = begun(decoder(8), "h100x2")
    none, every = (planned(free, each).memory for each in (SHARDED, AGAIN))
    search = begun(decoder(8), "h100x2", (none + every) // 2)
    search.estimates.look(AGAIN)
    assert set(search.estimates.looks) == {SHARDED, AGAIN}
    for each, look in search.estimates.looks.items():  # as if they were planned whole
        search.estimates.learn(each, look.answer)
    assert [search.estimates.has_room(each) for each in (SHARDED, AGAIN)] == [False, True]
    fewer = search.estimates.just_enough(AGAIN)
    assert 0 < fewer.recompute < 8
    assert planned(search, fewer).memory <= (none + every) // 2
    assert search.estimates.just_enough(SHARDED) == SHARDED
    assert free.estimates.just_enough(AGAIN) == AGAIN
    one, two, three = seconds(search.estimates, SHARDED, fewer, AGAIN)
    assert one < two < three
    order = search.estimates.of(CandidateTable.of((SHARDED, AGAIN))).seconds()
    assert one < order[1] < three
    assert order[0] > one


def test_what_lacks_little_stands_behind_by_what_it_lacks_and_other_points_behind_all() -> None:
    free = estimates()
    free.look(SHARDED)
    took, held = free.about(SHARDED)
    for part, times in ((1.1, 1.0), (0.9, 1 / 0.9), (0.7, 1000 / 0.7)):
        found = estimates(int(part * (held - reserve())))
        found.learn(SHARDED, measured(took, held))
        order = float(found.of(CandidateTable.of([SHARDED])).seconds()[0])
        assert order == pytest.approx(times * took, rel=1e-3)
        assert found.has_room(SHARDED) == (part > 1)


def test_what_was_not_planned_whole_needs_room_to_spare() -> None:
    """Llama 3 8B on 64 H100: its estimate said 85.3 of 85.5 GB, the whole plan took 87.0."""
    found = estimates()
    outlook = found.of(CandidateTable.of([SHARDED]))
    assert outlook.spare.tolist() == [LIKELY]
    found.look(SHARDED)
    assert outlook.spare.tolist() == [LIKELY]
    found.learn(SHARDED, measured(*found.about(SHARDED)))
    assert outlook.spare.tolist() == [1.0]


def test_what_comes_to_activations_is_the_same_for_more_samples() -> None:
    """Where only the batch is cut; what is less than estimated is so by a part."""
    few, many = (replace(SHARDED, micro_batches=number) for number in (1, 4))
    rough = roofline(CandidateTable.of((few, many)), estimates().lower_bounds)
    held, beside = rough.states + rough.beside, rough.beside
    for over in (0.5 * beside[1], -0.5 * beside[1]):
        found = estimates()
        found.learn(many, measured(1.0, held[1] + over))
        more = over if over > 0 else over * beside[0] / beside[1]
        assert found.about(few)[1] == pytest.approx(held[0] + more, rel=1e-6)
        found.learn(few, measured(1.0, held[0] + over))
        assert found.about(few)[1] == pytest.approx(held[0] + over, rel=1e-6)


def test_what_an_earlier_search_measured_counts() -> None:
    free = begun(decoder(8), "h100x2")
    free.estimates.look(SHARDED)
    looks, whole = free.estimates.looks, measured(1.5, reserve() + 10)
    learned = Learned({}, {}, {AGAIN: whole}, looks)
    found = SearchState(free.evaluator, free.lower_bounds, free.budget, learned).estimates
    assert found.probed(AGAIN)
    assert found.probed(SHARDED)
    assert found.measures(AGAIN) == whole
    assert seconds(found, AGAIN) == pytest.approx([1.5])


def test_plans_and_looks_at_many_micro_batches_take_longer() -> None:
    """Half of the time depends on their number; of a computed schedule it is found by simulations."""
    found, many = estimates(), Candidate(2, micro_batches=4)
    assert found.seconds_of_probe(many) == 0.0
    found.looks[Candidate(2)] = Probe(measured(1.0, reserve()), 8.0)
    assert found.seconds_of_plan(Candidate(2)) == 8.0
    assert found.seconds_of_plan(many) == 20.0
    assert found.seconds_of_probe(many) == pytest.approx(20.0 * 7 / 8)
    assert found.seconds_of_probe(Candidate(2)) == 0.0
    pipe = Candidate(2, stages=2, schedule="1f1b")
    assert found.seconds_of_plan(pipe) < found.seconds_of_plan(replace(pipe, schedule=""))


def test_a_step_without_blocks_has_no_looks() -> None:
    found = begun(layers(), "h100x2", base=Strategy(clip_norm=1.0)).estimates
    found.look(Candidate(2))
    assert found.looks[Candidate(2)].answer is None
    assert found.measures(Candidate(2)) is None
    assert found.just_enough(Candidate(2)) == Candidate(2)
    assert not found.measured
