"""Changes of tasks, replayed from where they matter: equal to full runs, to the bit; undone as if they never were."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.random_tasks import check_moves, random_tasks
from weft.errors import InternalError
from weft.simulator.delta.evaluation import NEVER, UNDONE, Change, Evaluation
from weft.simulator.timing.clock import run
from weft.simulator.timing.tasks import Lane, Tasks, in_ticks


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_give_what_full_runs_give(seed):
    check_moves(Random(seed), 400)


def chain(count: int, lanes: int = 1) -> Tasks:
    """Tasks of one second, each of which waits for the one before; they take turns on the lanes."""
    return Tasks(
        tuple(((0, task, 0, 0),) for task in range(count)),
        tuple((task - 1,) if task else () for task in range(count)),
        ((),) * count,
        tuple(task % lanes for task in range(count)),
        tuple(range(count)),
        (in_ticks(1.0),) * count,
        tuple(Lane(lane, "compute") for lane in range(lanes)),
        1,
    )


def test_a_late_change_moves_only_what_comes_after():
    evaluation = Evaluation(chain(100), stride=10)
    assert evaluation.seconds == 100
    assert evaluation.propose(Change({90: 3.0})) == 102
    evaluation.accept()
    assert evaluation.times.starts[89:93] == [89, 90, 93, 94]
    assert evaluation.seconds == 102
    evaluation.undo()
    assert evaluation.seconds == 100
    assert evaluation.times.starts == run(chain(100)).starts


def test_a_circle_takes_for_ever_and_is_not_accepted():
    evaluation = Evaluation(chain(10), stride=2)
    assert evaluation.propose(Change(needs={5: (4, 8)})) == NEVER
    with pytest.raises(InternalError, match="could be accepted"):
        evaluation.accept()
    evaluation.undo()
    assert evaluation.propose(Change({0: 2.0})) == 11


def test_moves_out_of_turn_are_refused():
    evaluation = Evaluation(chain(3))
    with pytest.raises(InternalError, match="no change to undo"):
        evaluation.undo()
    with pytest.raises(InternalError, match="no change that could be accepted"):
        evaluation.accept()
    evaluation.propose(Change({1: 2.0}))
    with pytest.raises(InternalError, match="proposed already"):
        evaluation.propose(Change({2: 2.0}))
    with pytest.raises(InternalError, match="for ever"):
        Evaluation(Tasks((((0, 0, 0, 0),),), ((0,),), ((),), (-1,), (0,), (1.0,), (), 1))


def test_as_many_changes_can_be_undone_as_are_kept():
    evaluation = Evaluation(chain(20), stride=4)
    for task in range(UNDONE + 2):
        evaluation.propose(Change({task: 2.0}))
        evaluation.accept()
    for undone in range(UNDONE):
        assert evaluation.seconds == 20 + UNDONE + 2 - undone
        evaluation.undo()
    with pytest.raises(InternalError, match="no change to undo"):
        evaluation.undo()


def test_bounds_are_those_of_the_busiest_lane():
    evaluation = Evaluation(chain(10, lanes=2))
    assert evaluation.bound(Change()) == 5
    assert evaluation.bound(Change({0: 4.0})) == 8
    evaluation.propose(Change({0: 4.0}))
    evaluation.accept()
    assert evaluation.bound(Change({0: 1.0})) == 5


def test_needs_are_those_with_what_is_proposed():
    tasks = random_tasks(Random(1))
    evaluation = Evaluation(tasks)
    last = len(tasks) - 1
    evaluation.propose(Change(needs={last: ()}))
    assert evaluation.needs(last) == ()
    evaluation.undo()
    assert evaluation.needs(last) == tasks.needs[last]
