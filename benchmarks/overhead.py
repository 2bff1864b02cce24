"""What the actor runtime costs on one process, over the same captured graph called as plain code.

    OMP_NUM_THREADS=1 python -m benchmarks.overhead

Both sides run the same local ops and torch's fused AdamW on the same machine code; one through actors, registers and
queues, one as a single generated function. The small models make any overhead show. Plans of many actors that do
nothing show what an act costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.measure import Step, compare, interleave, save
from examples.gpt_model import GPT, Batch, loss_fn
from weft.capture import capture
from weft.compiler.hints import Hints
from weft.compiler.pipeline import compile_graph
from weft.compiler.plans.specialize import Target, variant
from weft.ir.plan import (
    COMPUTE,
    HOST,
    Actor,
    Compute,
    Fetch,
    Hold,
    LocalCall,
    LocalUpdate,
    LocalValue,
    RankPlan,
    Register,
)
from weft.layout import placement
from weft.runtime.executor.optimizer import group_updates
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.kernels.generated import build_kernel
from weft.runtime.kernels.matmul import onednn_is_faster
from weft.runtime.memory.state import Variables

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A model, its batch, and how many steps make a round."""

    model: nn.Module
    batch: Batch
    steps: int


def gpt(layers: int, width: int, length: int, size: int, steps: int) -> Case:
    tokens = torch.randint(256, (size, length + 1))
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    return Case(GPT(layers, width, width // 64, length), batch, steps)


def mlp(width: int, size: int, steps: int) -> Case:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256))
    batch = {"x": torch.randn(size, 1, width), "y": torch.randint(256, (size, 1))}
    return Case(model, batch, steps)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_step(
    plan: RankPlan,
    variables: Variables,
    optimizer: torch.optim.Optimizer,
    feed: Mapping[str, Tensor],
) -> Step:
    """All local calls of the plan as one function, then the updates."""
    nodes = [node for actor in plan.actors if isinstance(actor, Compute) for node in actor.nodes]
    updates = [node for node in nodes if isinstance(node, LocalUpdate)]
    joined = group_updates(updates, variables, optimizer)
    fetched = [name for actor in plan.actors if isinstance(actor, Fetch) for name in actor.consumes]
    sources = [name for names, _ in joined for name in names]
    calls = [node for node in nodes if isinstance(node, LocalCall)]
    target = Target("cpu", onednn_is_faster())
    calls = [variant(call, target) for call in calls]
    kernel = build_kernel(calls, (*fetched, *sources), CPU)
    tensors = {
        given.value.name: feed[given.key]
        if given.role == "batch"
        else variables[given.key].detach()
        for given in plan.inputs
        if given.role == "batch" or given.key in variables
    }
    operands = [tensors[name] for name in kernel.inputs]

    def step() -> object:
        with torch.no_grad():
            outputs = kernel.function(None, *operands)
            start = len(fetched)
            for names, update in joined:
                update(outputs[start : start + len(names)])
                start += len(names)
        return outputs[0]

    return step


def measure(case: Case, rounds: int) -> dict[str, float]:
    captured = capture(case.model, loss_fn, adamw(case.model), case.batch)
    plan = compile_graph(captured.graph, Hints(), placement("cpu", [0]), [0]).plan.ranks[0]
    feed = captured.batch.flatten_batch(case.batch)

    def variables() -> Variables:
        copies = {name: value.detach().clone() for name, value in case.model.state_dict().items()}
        return Variables({**copies, **captured.constants})

    executor = ThreadExecutor(Rank(plan, CPU, {}, variables(), optimizer=adamw(case.model)))
    sides = {
        "weft": lambda: executor.step(feed),
        "plain": plain_step(plan, variables(), adamw(case.model), feed),
    }
    seconds = interleave(sides, rounds, case.steps)
    executor.close()
    found = compare(seconds, "weft", "plain")
    return {**found, "overhead": 1 / found["speed_relative_to_peer"] - 1}


def empty_plan(queues: Sequence[str], micro_batches: int) -> RankPlan:
    """A chain of actors that do nothing, on queues in turn; nothing but the order passes between them."""
    actors: list[Actor] = [Hold(0, ())]
    registers = []
    for id in range(1, EMPTY_ACTORS + 1):
        reads = (f"turn{id - 1}",) if id > 1 else ()
        queue = queues[id % len(queues)]
        actors.append(Compute(id, (), reads, (f"turn{id}",), queue=queue, acts=micro_batches))
        readers = (id + 1,) if id < EMPTY_ACTORS else ()
        turn = LocalValue(f"turn{id}", (0,), "bool")
        registers.append(Register(turn, "control", id, readers, 1, False, micro_batches))
    return RankPlan(0, (), tuple(actors), tuple(registers), micro_batches)


def microseconds_an_act(queues: Sequence[str], micro_batches: int, rounds: int) -> float:
    """What one act of an empty actor takes, the fastest of many steps: others only make it slower."""
    with ThreadExecutor(Rank(empty_plan(queues, micro_batches), CPU, {}, Variables())) as executor:
        seconds = []
        for _ in range(10 * rounds):
            start = perf_counter()
            executor.step({})
            seconds.append(perf_counter() - start)
    return min(seconds) / (EMPTY_ACTORS * micro_batches) * 1e6


# Queues and micro-batches of plans of empty actors.
EMPTY = {
    "act on one queue": ((COMPUTE,), 1),
    "act on one queue, 8 micro-batches": ((COMPUTE,), 8),
    "act after one on another queue": ((COMPUTE, HOST), 1),
}
EMPTY_ACTORS = 200

CASES = {
    "mlp width 64": lambda: mlp(64, 16, steps=200),
    "gpt 2x64": lambda: gpt(2, 64, 32, 2, steps=50),
    "gpt 4x256": lambda: gpt(4, 256, 128, 4, steps=4),
    "gpt 6x512": lambda: gpt(6, 512, 256, 8, steps=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of the actor runtime on one process.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    o = parser.parse_args()
    torch.manual_seed(0)
    found = {name: measure(CASES[name](), o.rounds) for name in o.cases}
    for name, (queues, micro_batches) in EMPTY.items():
        found[name] = {"microseconds": microseconds_an_act(queues, micro_batches, o.rounds)}
        print(f"{name}: {found[name]['microseconds']:.1f} us")
    save("overhead", {**found, "bound": "overhead <= 0.05, 5 us an act"})


if __name__ == "__main__":
    main()
