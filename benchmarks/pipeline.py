"""A pipelined GPT against `torch.distributed.pipelining`: same cut, same weights, same batches, same processes.

    OMP_NUM_THREADS=1 PYTHONPATH=. weft run -n 2 benchmarks/pipeline.py
    OMP_NUM_THREADS=1 PYTHONPATH=. weft run -n 4 benchmarks/pipeline.py

Every rank runs one stage of as many blocks; all sides update with torch's fused AdamW, and their losses must agree.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import cross_entropy

import weft
from benchmarks.measure import Step, compare, interleave, save
from examples.gpt_model import GPT, Batch, loss_fn
from weft.ir.plan import COMPUTE

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])

# What each of weft's schedules is compared with.
PEERS = {
    "computed": ("torch 1f1b", "torch zero_bubble"),
    "gpipe": ("torch gpipe",),
    "1f1b": ("torch 1f1b",),
    "zero_bubble": ("torch zero_bubble", "torch zbv"),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="weft against torch.distributed.pipelining.")
    sizes = {"layers": 8, "width": 512, "heads": 8, "length": 128, "batch": 16}
    for name, size in {**sizes, "micro_batches": 8, "rounds": 7, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--sides", nargs="*", help="only these")
    return parser.parse_args()


class Part(nn.Module):
    """Some blocks of a GPT; the first part embeds tokens, the last one makes logits."""

    def __init__(self, model: GPT, number: int, parts: int) -> None:
        super().__init__()
        count = len(model.blocks) // parts
        self.first, self.last = number == 0, number == parts - 1
        self.blocks = model.blocks[number * count : (number + 1) * count]
        if self.first:
            self.token, self.position = model.token, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.last else x


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def peer_step(
    make: Callable[..., Any],
    numbers: Sequence[int],
    model: GPT,
    batch: Batch,
    micro_batches: int,
    losses: list[float],
) -> Step:
    """One step of a schedule of torch; `numbers` are the parts of this rank, of all ranks' together."""
    parts = RANKS * len(numbers)
    model = copy.deepcopy(model)
    modules = [Part(model, number, parts) for number in numbers]
    weights = [weight for module in modules for weight in module.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    device = torch.device("cpu")
    stages = [
        PipelineStage(module, number, parts, device)
        for module, number in zip(modules, numbers, strict=True)
    ]
    several = make in (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
    schedule = make(stages if several else stages[0], micro_batches, loss_fn=token_loss)
    first, last = 0 in numbers, parts - 1 in numbers
    owner = 0 if make is ScheduleZBVZeroBubble else RANKS - 1

    def step() -> None:
        optimizer.zero_grad()
        found: list[Tensor] = []
        inputs = (batch["x"],) if first else ()
        schedule.step(*inputs, **({"target": batch["y"], "losses": found} if last else {}))
        optimizer.step()
        total = torch.stack(found).mean().detach() if last else torch.zeros(())
        dist.broadcast(total, owner)
        losses.append(total.item())

    return step


def own_program(schedule: str, model: GPT, batch: Batch, micro_batches: int) -> weft.Program:
    """A program with one stage on each rank, cut like the peers."""
    count = len(model.blocks) // RANKS
    patterns = [[f"blocks.{rank * count + i}" for i in range(count)] for rank in range(RANKS)]
    patterns[0] += ["token", "position"]
    patterns[-1] += ["norm", "head"]
    stages = [
        weft.Stage(each, placement=weft.placement("cpu", [rank]))
        for rank, each in enumerate(patterns)
    ]
    strategy = weft.Strategy(
        stages=stages,
        micro_batches=micro_batches,
        schedule=None if schedule == "computed" else schedule,  # type: ignore[arg-type]  # a name of PEERS
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    placement = weft.placement("cpu", range(RANKS))
    return weft.compile(model, loss_fn, optimizer, batch, placement=placement, strategy=strategy)


class Busy:
    """Seconds that the compute queue of this rank works, in all steps since `clear`."""

    def __init__(self, program: weft.Program) -> None:
        self.seconds = 0.0
        # The executor's own dict: it looks an actor's work up for every act.
        works: Any = program._executors[RANK]._compute._works
        for actor in program.plan.ranks[0].actors:
            if actor.queue == COMPUTE:
                works[actor.id] = replace(works[actor.id], act=self._timed(works[actor.id].act))

    def _timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            made = act(*arguments)
            self.seconds += time.perf_counter() - start
            return made

        return timed

    def clear(self) -> None:
        self.seconds = 0.0


def measured_bubble(program: weft.Program, batch: Batch, steps: int) -> float:
    """The part of a step in which ranks do not compute, over all of them; the best of some steps."""
    program.step(batch)  # measures memory, and so is slow
    busy = Busy(program)
    found = []
    for _ in range(steps):
        dist.barrier()
        busy.clear()
        start = time.perf_counter()
        program.step(batch)
        total = torch.tensor([busy.seconds, time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(total)
        found.append(1 - float(total[0] / total[1]))
    return statistics.median(found)


def rehearsed_bubble(program: weft.Program) -> float:
    """The same part as the rehearsal of the plan says it."""
    rehearsal = program._compiled.schedule.rehearsal
    plans = program._compiled.schedule.plans
    assert rehearsal is not None
    makespan: float = rehearsal.makespan
    busy: list[float] = [
        each.end - each.start
        for plan in plans
        for each in rehearsal.timelines[plan.rank]
        if plan.actors[each.actor].queue == COMPUTE
    ]
    return 1 - sum(busy) / (makespan * len(plans))


def theory(schedule: str, micro_batches: int) -> float:
    """The schedule's bubble when all stages and parts of them take as long and communication nothing.

    GPipe and 1F1B: (p - 1) / (m + p - 1) (Narayanan et al., arXiv 2104.04473); a backward split in
    two, ZB-H1: (p - 1) / (3 m + p - 1) (Qi et al., arXiv 2401.10241, section 2).
    """
    parts = 3 if schedule in ("zero_bubble", "computed") else 1
    return (RANKS - 1) / (parts * micro_batches + RANKS - 1)


def peers(o: argparse.Namespace, model: GPT, batch: Batch) -> dict[str, tuple[Step, list[float]]]:
    turn = 2 * RANKS - 1 - RANK
    kinds: dict[str, tuple[Any, list[int]]] = {
        "torch gpipe": (ScheduleGPipe, [RANK]),
        "torch 1f1b": (Schedule1F1B, [RANK]),
        "torch zero_bubble": (ScheduleInterleavedZeroBubble, [RANK]),
        "torch zbv": (ScheduleZBVZeroBubble, [RANK, turn]),
    }
    made = {}
    for name, (kind, numbers) in kinds.items():
        losses: list[float] = []
        if wanted(o, name) and len(model.blocks) % (RANKS * len(numbers)) == 0:
            step = peer_step(kind, numbers, model, batch, o.micro_batches, losses)
            made[name] = (step, losses)
    return made


def wanted(o: argparse.Namespace, name: str) -> bool:
    return o.sides is None or name in o.sides


def check(losses: Mapping[str, list[float]]) -> float:
    """The largest relative difference between the losses of two sides."""
    columns = zip(*losses.values(), strict=True)
    difference = max((max(each) - min(each)) / abs(min(each)) for each in columns)
    if difference > 1e-3:
        raise AssertionError(f"the losses of the sides differ by {difference:.1e}")
    return difference


def main() -> None:
    o = options()
    torch.manual_seed(0)
    model = GPT(o.layers, o.width, o.heads, o.length)
    tokens = torch.randint(256, (o.batch, o.length + 1))
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    names = [name for name in PEERS if wanted(o, name)]
    programs = {name: own_program(name, model, batch, o.micro_batches) for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    sides: dict[str, Step] = {
        name: lambda name=name: losses[name].append(float(programs[name].step(batch)))  # type: ignore[misc]
        for name in names
    }
    for name, (step, found) in peers(o, model, batch).items():
        sides[name], losses[name] = step, found
    seconds = interleave(sides, o.rounds, o.steps, before=dist.barrier)
    result: dict[str, Any] = {
        name: {
            "bubble": measured_bubble(program, batch, o.steps * 3),
            "bubble_in_theory": theory(name, o.micro_batches),
            "bubble_rehearsed": rehearsed_bubble(program),
            "against": {
                peer: compare(seconds, name, peer) for peer in PEERS[name] if peer in sides
            },
        }
        for name, program in programs.items()
    }
    settings = {key: value for key, value in vars(o).items() if key != "sides"}
    if RANK == 0:
        settings |= {"ranks": RANKS, "max_relative_loss_difference": check(losses)}
        bound = "speed_relative_to_peer >= 1, bubble <= bubble_in_theory + 0.05"
        save(f"pipeline_{RANKS}", {**settings, **result, "bound": bound})


if __name__ == "__main__":
    main()
