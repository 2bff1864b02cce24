"""Changes of tasks that run beside others: equal to runs of the changed tasks; the plain evaluation where none do."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.random_tasks import changed as made_anew
from benchmarks.random_tasks import random_change, random_tasks
from weft.errors import InternalError
from weft.hardware.costs import Slowdown
from weft.simulator.delta.beside_evaluation import BesideEvaluation, changed, evaluation_of
from weft.simulator.delta.evaluation import NEVER, Change, Evaluation
from weft.simulator.timing.sharing import LinkSharing
from weft.simulator.timing.slowdown import run_beside

LINK = LinkSharing([{0: 1.0}, {0: 0.75}], [1.0, 0.75])
SLOW = {0: Slowdown(1.5), 2: Slowdown(3.0, 2.0)}


@pytest.mark.parametrize("seed", range(6))
def test_random_moves_give_what_full_runs_give(seed):
    random = Random(seed)
    tasks = random_tasks(random)
    uses = [random.choice((-1, 0, 1)) if lane < 0 else -1 for lane in tasks.lane]
    evaluation = evaluation_of(tasks, SLOW, LINK, uses)
    assert isinstance(evaluation, BesideEvaluation)
    for _ in range(20):
        change = random_change(random, tasks)
        wanted = made_anew(tasks, change)
        assert changed(tasks, change) == wanted
        assert evaluation.propose(change) == run_beside(wanted, SLOW, LINK, uses).makespan
        if random.random() < 0.5:
            evaluation.undo()
            continue
        before = evaluation.times
        evaluation.accept()
        assert evaluation.times == run_beside(wanted, SLOW, LINK, uses)
        if random.random() < 0.3:
            evaluation.undo()
            assert evaluation.times == before
        else:
            tasks = wanted
    assert evaluation.seconds == run_beside(tasks, SLOW, LINK, uses).makespan


def test_where_nothing_runs_beside_it_is_the_plain_evaluation():
    tasks = random_tasks(Random(1))
    assert isinstance(evaluation_of(tasks, {0: Slowdown()}), Evaluation)


def test_moves_out_of_turn_and_circles_are_refused():
    tasks = random_tasks(Random(3))
    evaluation = BesideEvaluation(tasks, SLOW)
    with pytest.raises(InternalError, match="no change to undo"):
        evaluation.undo()
    with pytest.raises(InternalError, match="could be accepted"):
        evaluation.accept()
    last = len(tasks) - 1
    assert evaluation.propose(Change(needs={0: (last,), last: (0,)})) == NEVER
    assert evaluation.needs(0) == (last,)
    with pytest.raises(InternalError, match="proposed already"):
        evaluation.propose(Change())
    with pytest.raises(InternalError, match="could be accepted"):
        evaluation.accept()
    evaluation.undo()
    assert evaluation.needs(0) == tasks.needs[0]
