"""Random tasks and random changes of them, zero-length and equally long ones included."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from weft.simulator.delta.evaluation import Change, Evaluation
from weft.simulator.timing.clock import run
from weft.simulator.timing.tasks import Lane, Tasks, in_ticks

# Tasks wait for others at most so far back, so that some parts of a graph do not hang together.
REACH = 8


def random_tasks(random: Random, most: int = 60) -> Tasks:
    """Up to `most` tasks on up to four lanes, some of which are on none."""
    size, lanes = random.randint(1, most), random.randint(1, 4)
    turns = list(range(size))
    random.shuffle(turns)
    return Tasks(
        tuple(((0, task, 0, 0),) for task in range(size)),
        tuple(_needs(random, task) for task in range(size)),
        ((),) * size,
        tuple(random.randint(-1, lanes - 1) for _ in range(size)),
        tuple(turns),
        tuple(
            in_ticks(random.choice((0, 0, 1, 1, 2, 3, 5)) / random.choice((1, 1, 1, 3)))
            for _ in range(size)
        ),
        tuple(Lane(rank, "compute") for rank in range(lanes)),
        1,
    )


def _needs(random: Random, task: int) -> tuple[int, ...]:
    reach = range(max(0, task - REACH), task)
    return tuple(sorted(random.sample(reach, min(len(reach), random.randint(0, 3)))))


def random_change(random: Random, tasks: Tasks) -> Change:
    """Other seconds, needs and turns of some tasks: one kind of change, or all of them."""
    size, kind = len(tasks), random.randint(0, 3)
    some = random.sample(range(size), min(size, random.choice((1, 1, 2, 5))))
    seconds = {task: in_ticks(random.choice((0, 0.5, 1, 2, 4))) for task in some}
    needs = {task: _needs(random, task) for task in some}
    turns = {}
    if size > 1:
        one, other = random.sample(range(size), 2)
        turns = {one: tasks.turn[other], other: tasks.turn[one]}
    return Change(
        seconds if kind in (0, 3) else {},
        needs if kind in (1, 3) else {},
        turns if kind in (2, 3) else {},
    )


def changed(tasks: Tasks, change: Change) -> Tasks:
    """The tasks with a change, made anew."""

    def with_new(old: tuple, new: dict) -> tuple:  # type: ignore[type-arg]
        return tuple(new.get(task, own) for task, own in enumerate(old))

    return replace(
        tasks,
        seconds=with_new(tasks.seconds, dict(change.seconds)),
        needs=with_new(tasks.needs, dict(change.needs)),
        turn=with_new(tasks.turn, dict(change.turns)),
    )


def check_moves(random: Random, moves: int) -> None:
    """Propose, accept and undo random changes of random tasks; each time compare with a full run, to the bit.

    Raises:
        AssertionError: when something differs.
    """
    left = moves
    while left > 0:
        tasks = random_tasks(random)
        evaluation, before = Evaluation(tasks, stride=3), list[Tasks]()
        for _ in range(min(left, 40)):
            change = random_change(random, tasks)
            new = changed(tasks, change)
            wanted = run(new)
            assert evaluation.bound(change) <= wanted.makespan
            assert evaluation.propose(change) == wanted.makespan
            if random.random() < 0.5:
                evaluation.accept()
                before, tasks = [*before[-7:], tasks], new
            else:
                evaluation.undo()
            if before and random.random() < 0.1:
                evaluation.undo()
                tasks = before.pop()
            times, found = run(tasks), evaluation.times
            assert (times.starts, times.ends) == (found.starts, found.ends)
            assert sorted(found.order) == list(range(len(tasks)))
        left -= 40
