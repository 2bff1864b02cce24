"""Candidates on ranks of their own: one that fails on one rank is left out on all, and training goes on."""

from __future__ import annotations

import copy
import gc
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from weft.errors import RankFailure
from weft.program.planning.auto import Trials


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def lacking_once() -> None:
    """On the last rank the copies of the first candidate have no room."""
    variables, made = Trials._variables, []

    def found(self, graph, rank):
        made.append(rank)
        if len(made) == 1 and rank == 1:
            raise MemoryError("no room for copies")
        return variables(self, graph, rank)

    Trials._variables = found


def tensors_after_each() -> list[int]:
    """How many tensors are alive on this rank after each trial from now on, those included that nobody reaches."""
    seconds, alive = Trials.seconds, []

    def found(self, strategy, placement):
        took = seconds(self, strategy, placement)
        alive.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        return took

    Trials.seconds = found
    return alive


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(8) % 4
    batch = {"x": ids, "y": ids}
    plain, plainly = copy.deepcopy((model, optimizer))
    # Only the rows of the last rank ask for what is not there.
    wrong = {"x": torch.where(torch.arange(8) < 4, ids, 9), "y": ids}
    two = weft.placement("cpu", [0, 1])
    fixed = weft.Strategy(batch={"*": weft.split(0)}, parameters={"*": weft.broadcast})
    auto = weft.Auto(moves=4, measure=4, fixed=fixed)
    try:
        weft.compile(model, loss, optimizer, wrong, placement=two, strategy=auto)
    except RankFailure as error:
        sys.stdout.write(f"told: {error}\n")
    alive = tensors_after_each()
    lacking_once()
    program = weft.compile(model, loss, optimizer, batch, placement=two, strategy=auto)
    sys.stdout.write(f"alive: {alive}\n")
    assert max(alive) == min(alive)
    for _ in range(3):
        expected = loss(plain, batch)
        plainly.zero_grad()
        expected.backward()
        plainly.step()
        torch.testing.assert_close(program.step(batch), expected.detach())
    program.close()
    sys.stdout.write("trained\n")


main()
