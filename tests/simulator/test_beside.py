"""What runs beside something else is slower: calls beside communications, communications on links that they share."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import law
from weft.errors import InternalError
from weft.hardware.costs import Contention
from weft.simulator.clock import run
from weft.simulator.sharing import LinkSharing
from weft.simulator.tasks import Lane, Tasks, to_ticks

# Two that need a link whole, and one that needs half of it.
WHOLE, OTHER, HALF = range(3)
LINK = LinkSharing([{0: 1.0}, {0: 1.0}, {0: 0.5}], [1.0, 1.0, 0.5])


SLOW = {0: Contention(1.5), 1: Contention(), 2: Contention(3.0, 2.0)}


def tasks_of(*given: tuple[int, float, Sequence[int]]) -> Tasks:
    """Tasks (rank, seconds, needs); a rank's compute lane, or -1 for a communication of rank 0."""
    ranks = sorted({rank for rank, _, _ in given if rank >= 0})
    return Tasks(
        tuple(((max(rank, 0), task, 0, 0),) for task, (rank, _, _) in enumerate(given)),
        tuple(tuple(needs) for _, _, needs in given),
        tuple(ranks.index(rank) if rank >= 0 else -1 for rank, _, _ in given),
        tuple(to_ticks(seconds) for _, seconds, _ in given),
        tuple(Lane(rank, "compute") for rank in ranks),
    )


def random_tasks(random: Random) -> Tasks:
    """Up to 60 tasks on up to four lanes, some of which are on none; some last no time, some equally long."""
    size, lanes = random.randint(1, 60), random.randint(1, 4)

    def needs(task: int) -> tuple[int, ...]:
        reach = range(max(0, task - 8), task)
        return tuple(sorted(random.sample(reach, min(len(reach), random.randint(0, 3)))))

    return Tasks(
        tuple(((0, task, 0, 0),) for task in range(size)),
        tuple(needs(task) for task in range(size)),
        tuple(random.randint(-1, lanes - 1) for _ in range(size)),
        tuple(
            to_ticks(random.choice((0, 0, 1, 1, 2, 3, 5)) / random.choice((1, 1, 1, 3)))
            for _ in range(size)
        ),
        tuple(Lane(rank, "compute") for rank in range(lanes)),
    )


@pytest.mark.parametrize("seed", range(40))
def test_where_nothing_meets_all_is_as_fast_as_alone(seed):
    tasks = random_tasks(Random(seed))
    beside = run(tasks, {}, LINK, [-1] * len(tasks))
    assert beside == run(tasks)


def test_two_that_need_a_link_whole_have_half_of_it_each():
    tasks = tasks_of((-1, 4.0, ()), (0, 1.0, ()), (-1, 2.0, (1,)))
    times = run(tasks, {}, LINK, [WHOLE, -1, OTHER])
    # After one second alone both run at half of their speed: the second has ended after four more.
    assert times.starts == [0.0, 0.0, 1.0]
    assert times.ends == [6.0, 1.0, 5.0]
    assert times.order == [1, 2, 0]


def test_one_that_needs_less_than_its_part_is_as_fast_as_alone():
    tasks = tasks_of((-1, 4.0, ()), (-1, 2.0, ()))
    assert run(tasks, {}, LINK, [WHOLE, HALF]).ends == [5.0, 2.0]


def test_groups_of_one_communication_do_not_slow_each_other_down():
    tasks = tasks_of((-1, 4.0, ()), (-1, 4.0, ()), (-1, 1.0, ()))
    assert run(tasks, {}, LINK, [WHOLE, WHOLE, -1]).ends == [4.0, 4.0, 1.0]
    # One of them comes late, and has the speed of the other.
    late = tasks_of((-1, 4.0, ()), (-1, 8.0, ()), (0, 1.0, ()), (-1, 1.0, (2,)))
    assert run(late, {}, LINK, [WHOLE, OTHER, -1, WHOLE]).ends == [8.0, 12.0, 1.0, 3.0]


def test_calls_are_slower_while_a_communication_runs():
    tasks = tasks_of((0, 4.0, ()), (1, 1.0, ()), (-1, 2.0, (1,)), (0, 1.0, (2,)))
    times = run(tasks, {0: Contention(2.0)})
    # One second alone, two at half of the speed, two alone.
    assert times.ends == [5.0, 1.0, 3.0, 6.0]
    # A call that begins beside a communication is slow at once; another rank's is not.
    tasks = tasks_of((-1, 2.0, ()), (0, 2.0, ()), (1, 2.0, ()))
    assert run(tasks, {0: Contention(2.0), 1: Contention()}).ends == [2.0, 3.0, 2.0]


def test_communications_are_slower_while_calls_run():
    tasks = tasks_of((0, 2.0, ()), (-1, 3.0, ()))
    # Two seconds in which one is done, and two alone.
    assert run(tasks, {0: Contention(exchanges=2.0)}).ends == [2.0, 4.0]
    # Calls that follow one another are as one; both are slow.
    tasks = tasks_of((0, 1.0, ()), (0, 1.0, (0,)), (-1, 4.0, ()))
    assert run(tasks, {0: Contention(2.0, 4.0)}).ends == [2.0, 4.0, 7.0]
    # Half of a link at half of the speed.
    tasks = tasks_of((0, 4.0, ()), (-1, 1.0, ()), (-1, 1.0, ()))
    found = run(tasks, {0: Contention(exchanges=2.0)}, LINK, [-1, WHOLE, OTHER])
    assert found.ends == [4.0, 4.0, 4.0]


def test_tasks_that_wait_for_each_other_are_an_error():
    tasks = tasks_of((0, 1.0, (1,)), (0, 1.0, (0,)))
    with pytest.raises(InternalError, match="2 tasks wait for each other"):
        run(tasks, {0: Contention(2.0)})


NEEDS = st.dictionaries(
    st.integers(0, 4), st.sampled_from((0.1, 0.25, 0.5, 0.9, 1.0)), min_size=1, max_size=3
)


@law(60)
@given(st.lists(NEEDS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_speeds_are_fair(needs, random):
    """No link is overfull, and who is slower than alone needs a full link of which nobody has a larger part."""
    most = [max(own.values()) for own in needs]
    running = tuple(range(len(needs)))
    speeds = LinkSharing(needs, most).speeds(running)
    assert all(0 < speed <= 1 for speed in speeds.values())

    def filled(link):
        return sum(speeds[one] * own.get(link, 0.0) for one, own in enumerate(needs))

    assert all(filled(link) <= 1 + 1e-9 for link in range(5))
    for one, own in enumerate(needs):
        part = speeds[one] * most[one]
        assert speeds[one] == 1 or any(
            filled(link) >= 1 - 1e-9
            and all(speeds[b] * most[b] <= part + 1e-9 for b in running if link in needs[b])
            for link in own
        )
    order = list(running)
    random.shuffle(order)
    shuffled = LinkSharing([needs[one] for one in order], [most[one] for one in order])
    assert [shuffled.speeds(running)[order.index(one)] for one in running] == list(
        dict(sorted(speeds.items())).values()
    )


@law(30)
@given(st.integers(0, 10_000), st.data())
def test_beside_others_nothing_takes_less_than_alone(seed, data):
    tasks = random_tasks(Random(seed))
    each = st.integers(-1, 2)
    uses = [
        data.draw(each) if lane < 0 and seconds else -1
        for lane, seconds in zip(tasks.lane, tasks.seconds, strict=True)
    ]
    times = run(tasks, SLOW, LINK, uses)
    assert sorted(times.order) == list(range(len(tasks)))
    for task, seconds in enumerate(tasks.seconds):
        took = times.ends[task] - times.starts[task]
        assert took >= seconds
        assert all(times.ends[need] <= times.starts[task] for need in tasks.needs[task])
        if tasks.lane[task] >= 0:
            assert took <= 3 * seconds + 1e-9
        elif uses[task] < 0:
            assert took <= 2 * seconds + 1e-9
    again = run(tasks, SLOW, LINK, uses)
    assert again == times
