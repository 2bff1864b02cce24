"""Delta simulation: equal to full simulation on random moves, and how much faster on a GPT of 96 layers on 64 ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.delta_check --moves 100000 --seed 0
    OMP_NUM_THREADS=1 python -m benchmarks.delta_check --speed --layers 96
    OMP_NUM_THREADS=1 python -m benchmarks.delta_check --planned --layers 24 --moves 10
    OMP_NUM_THREADS=1 python -m benchmarks.delta_check --planned --layers 16 --moves 20 --equal

Nothing is run, and nothing has data: the model is on the meta device. Seconds are the processor's. A full simulation
runs the same tasks from the begin, with (`full`) and without (`run`) making its lists anew. With `--planned`, moves of
each kind are planned and simulated, by delta and in full; with `--equal` each answer is compared with the full one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import torch

import weft
from benchmarks.random_moves import KINDS, applied, random_move
from benchmarks.random_tasks import check_moves
from examples.gpt_model import GPT, loss_fn
from weft.compiler.options import options_of
from weft.compiler.pipeline import compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.hardware import usual_device
from weft.planning.explorer import Explorer
from weft.planning.moves import Candidate, OtherStrategy
from weft.planning.progress import uncollected
from weft.planning.stored_step import StoredStep
from weft.simulator import PlannedStep
from weft.simulator.delta.evaluation import Change, Evaluation
from weft.simulator.steps.acts import act_costs
from weft.simulator.timing.clock import TaskClock, TaskWeb
from weft.simulator.timing.tasks import Tasks, in_ticks, tasks_of

RANKS = 64
PLAIN = weft.Strategy(batch={"*": weft.split(0)}, parameters={"*": weft.broadcast})
CASES = {
    "data 64, ZeRO 1": (list(range(RANKS)), replace(PLAIN, zero=weft.Zero(1))),
    "stages 8 x data 8, 16 micro-batches": (
        torch.arange(RANKS).reshape(8, 8).tolist(),
        replace(PLAIN, stages=8, micro_batches=16, schedule="1f1b"),
    ),
}


def planned(layers: int) -> Iterable[tuple[str, PlannedStep]]:
    """The cases, planned for the ranks that stand for all."""
    with torch.device("meta"):
        model = GPT(layers, 1024, heads=16, length=1024, vocabulary=50304)
        tokens = torch.empty(256, 1024, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = weft.Step(model, loss_fn, optimizer, {"x": tokens, "y": tokens})
    for name, (ranks, strategy) in CASES.items():
        placement, options = weft.placement("cuda", ranks), options_of(strategy)
        graph = step.captured("cpu", options.precision, ()).graph
        hints = strategy_hints(strategy, graph, stage_placements(options.stages, placement))
        compiled = compile_graph(graph, hints, placement, (0,), options)
        classes = compiled.schedule.classes
        first = set(classes.values()) or {0}
        plans = [plan for plan in compiled.schedule.plans if plan.rank in first]
        communicators = compiled.plan.communicators
        yield name, PlannedStep(compiled.graph, plans, communicators, range(RANKS), classes)


def tasks_for(step: PlannedStep) -> Tasks:
    """The tasks of one step on usual devices."""
    acts = act_costs(step, usual_device("cuda"))
    seconds = {plan.rank: acts.seconds(plan.rank) for plan in step.plans}
    return tasks_of(step.plans, seconds)


def full_seconds(tasks: Tasks, times: int = 20) -> tuple[float, float]:
    """Seconds of a full simulation: with its lists made anew, and without."""
    begin = time.process_time()
    for _ in range(times):
        web = TaskWeb.of(tasks)
    made = (time.process_time() - begin) / times
    begin = time.process_time()
    for _ in range(times):
        clock = TaskClock(web)
        clock.begin()
        clock.run()
    ran = (time.process_time() - begin) / times
    return made + ran, ran


def delta_seconds(tasks: Tasks, moves: Iterable[Iterable[int]], random: Random) -> float:
    """Seconds of an evaluation of a change of the seconds of some tasks, undone after."""
    evaluation, count = Evaluation(tasks), 0
    begin = time.process_time()
    for some in moves:
        factor = random.choice((0.5, 0.9, 1.1, 2.0))
        evaluation.propose(Change({one: in_ticks(tasks.seconds[one] * factor) for one in some}))
        evaluation.undo()
        count += 1
    return (time.process_time() - begin) / count


def report_speed(layers: int, moves: int) -> None:
    """Evaluations a second, of changes of one act and of all acts of an actor."""
    for name, step in planned(layers):
        tasks, random = tasks_for(step), Random(0)
        full, run = full_seconds(tasks)
        actors: dict[tuple[int, int], list[int]] = {}
        for task, members in enumerate(tasks.members):
            rank, actor, *_ = members[0]
            actors.setdefault((rank, actor), []).append(task)
        kinds = {
            "one act": [[random.randrange(len(tasks))] for _ in range(moves)],
            "an actor": random.choices(list(actors.values()), k=moves),
        }
        print(f"{name}: {len(tasks)} tasks; full {full * 1e3:.2f} ms, run {run * 1e3:.2f} ms")
        for kind, drawn in kinds.items():
            delta = delta_seconds(tasks, drawn, random)
            print(
                f"  {kind} changed: {1 / delta:.0f} evaluations a second, {full / delta:.1f} x as fast as full, "
                f"{run / delta:.1f} x as fast as run"
            )


def staged(layers: int) -> weft.Strategy:
    """8 stages of equal runs of layers, each on 8 ranks, with 16 micro-batches; fewer stages of fewer layers."""
    count = min(8, layers // 2)
    width, stages = RANKS // count, []
    for number in range(count):
        own = range(layers * number // count, layers * (number + 1) // count)
        names = [f"blocks.{layer}" for layer in own]
        names += ["token", "position"] if number == 0 else []
        names += ["norm", "head"] if number == count - 1 else []
        ranks = list(range(number * width, (number + 1) * width))
        stages.append(weft.Stage(names, weft.placement("cuda", ranks)))
    return replace(PLAIN, stages=tuple(stages), micro_batches=16, schedule="1f1b")


def full_answer(step: StoredStep, candidate: Candidate) -> tuple[Explorer, float]:
    """A candidate, planned and simulated with nothing kept, and how long that took."""
    begin = time.process_time()
    full = Explorer(step, candidate, f"h100x{RANKS}", kept=0)
    assert full.seconds
    return full, time.process_time() - begin


def check_equal(found: Explorer, full: Explorer) -> None:
    """Raise where an answer by delta is not the full one."""
    if found.plans != full.plans or found.simulation != full.simulation:
        raise SystemExit(f"delta is not full: {found.candidate}")
    if found.simulation.traces != full.simulation.traces:
        raise SystemExit(f"delta's timelines are not those of full: {found.candidate}")


def report_planned(layers: int, moves: int, seed: int, equal: bool) -> None:
    """Seconds of moves of each kind that are planned and simulated, by delta and in full."""
    with torch.device("meta"):
        model = GPT(layers, 1024, heads=16, length=1024, vocabulary=50304)
        tokens = torch.empty(256, 1024, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = weft.Step(model, loss_fn, optimizer, {"x": tokens, "y": tokens}).stored()
    random, strategy = Random(seed), staged(layers)
    with uncollected():
        found = Explorer(step, strategy, f"h100x{RANKS}")
        for kind in KINDS:
            delta, full, refused, done = 0.0, 0.0, 0, 0
            # The first two fill what is kept, and are not counted.
            while done < moves + 2:
                move = random_move(kind, random, found, step)
                if move is None:
                    continue
                begin = time.process_time()
                answer = applied(found, move)
                took = time.process_time() - begin
                if isinstance(answer, str):
                    refused += 1
                    continue
                bound = found.lower_bound(OtherStrategy(found.candidate.strategy))
                if bound > answer:
                    raise SystemExit(f"the bound {bound} is above {answer}: {found.candidate}")
                done += 1
                if equal or 2 < done <= 5:
                    other, seconds = full_answer(step, found.candidate)
                    full += seconds
                    if equal:
                        check_equal(found, other)
                delta += took if done > 2 else 0.0
                if random.random() < 0.5:
                    found.undo()
            mean, whole = delta / moves, full / (done if equal else min(3, moves))
            said = f"{1 / mean:.2f} a second, {mean:.3f} s; full {whole:.3f} s: {whole / mean:.1f} x as fast"
            print(f"{kind}: {said}; {refused} refused{', all equal' if equal else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--planned", action="store_true")
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--layers", type=int, default=96)
    given = parser.parse_args()
    if given.speed:
        report_speed(given.layers, given.moves)
        return
    if given.planned:
        report_planned(given.layers, given.moves, given.seed, given.equal)
        return
    check_moves(Random(given.seed), given.moves)
    print(f"{given.moves} moves: equal to full simulations")


if __name__ == "__main__":
    main()
