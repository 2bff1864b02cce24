"""Pairs of ranks that do not do the same, one pair of processes for each case: what each of them is told, and when.

Forked from one process that has imported everything, which saves most of the time. Prints a JSON object:
case -> rank -> [seconds, error, last loss].
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from inline_streams import Inline
from program.live_models import eager_step
from weft.errors import RankFailure, UserError
from weft.runtime.channels.process import NcclChannel
from weft.runtime.devices.backend import BACKENDS
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.failures.failure_store import PATIENCE
from weft.runtime.world.distributed import TRANSPORT, current_world

# Seconds after which a case is ended.
LIMIT = 200
# Pairs of processes at a time.
AT_A_TIME = 4


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return result


def make(
    width: int = 4, **options: Any
) -> tuple[weft.Program, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(width, 4), "y": torch.randn(width, 1)}
    ranks = weft.placement("cpu", [0, 1])
    return (
        weft.compile(model, squares, optimizer, batch, placement=ranks, **options),
        optimizer,
        batch,
    )


def steps(program: weft.Program, batch: Any, count: int = 3) -> float:
    loss = 0.0
    for _ in range(count):
        loss = program.step(batch).item()
    return loss


def rates(rank: int) -> float:
    program, optimizer, batch = make()
    steps(program, batch)
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    return steps(program, batch)


def numbers(rank: int) -> float:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.factor = 1.0  # type: ignore[assignment]
    options = {"placement": weft.placement("cpu", [0, 1])}
    batch = torch.ones(4, 4)
    loss = lambda model, x: (model(x) * model.factor).square().mean()  # noqa: E731
    program = weft.compile(model, loss, torch.optim.SGD(model.parameters()), batch, **options)
    for step in range(3):
        model.factor = 1.0 + step  # type: ignore[assignment]
        program.step(batch)
    model.factor += rank  # type: ignore[operator]
    return steps(program, batch)


def _by_a_factor(factor: torch.Tensor) -> tuple[weft.Program, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 1), torch.ones(4, 4)
    loss = lambda model, x: (model(x) * factor).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters())
    ranks = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss, optimizer, batch, placement=ranks), batch


def other_outside(rank: int) -> float:
    program, batch = _by_a_factor(torch.ones(1) + rank)
    return steps(program, batch)


def written_outside(rank: int) -> float:
    factor = torch.ones(1)
    program, batch = _by_a_factor(factor)
    steps(program, batch)
    factor.add_(rank)
    return steps(program, batch)


def written_outside_by_numpy(rank: int) -> float:
    factor = torch.ones(1)
    program, batch = _by_a_factor(factor)
    steps(program, batch)
    factor.numpy()[0] += rank
    return steps(program, batch, 16)


def updates(rank: int) -> float:
    program, _, batch = make()
    steps(program, batch)
    program.step(batch, update=rank == 0)
    return steps(program, batch)


def other_batch(rank: int) -> float:
    program, _, batch = make()
    steps(program, batch)
    return steps(program, {"x": batch["x"] + rank, "y": batch["y"]})


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Samples by their number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(number)), "y": torch.ones(1)}


def other_seed_of_a_loader(rank: int) -> float:
    """Each rank loads other rows anyway: it is the numbers of the whole batch that differ."""
    program, _, batch = make()
    loader = weft.Loader(Numbered(), 4, program, shuffle=True, seed=rank)
    steps(program, batch)
    return sum(float(program.step(batch)) for batch in loader)


def one_label(rank: int) -> float:
    program, _, batch = make()
    batch["y"][3] += rank
    return steps(program, batch)


def long_batch(rank: int) -> float:
    """Too long for all of it to be looked at in every step; another one all over."""
    program, _, batch = make(4096)
    steps(program, batch, 6)
    return steps(program, {name: leaf + rank for name, leaf in batch.items()})


def other_shape(rank: int) -> float:
    program, _, batch = make()
    steps(program, batch)
    return steps(program, {name: leaf[: 4 - 2 * rank] for name, leaf in batch.items()})


def skipped(rank: int) -> float:
    program, _, batch = make()
    steps(program, batch)
    if rank:
        program.full_state_dict()
    return steps(program, batch)


def state_alone(rank: int) -> float:
    program, _, batch = make()
    loss = steps(program, batch)
    if rank == 0:
        program.full_state_dict()
    return loss


def two_programs(rank: int) -> float:
    first, _, batch = make()
    second, _, _ = make()
    for program in (first, second) if rank else (second, first):
        steps(program, batch, 1)
    return 0.0


def own_rows(rank: int) -> float:
    """What a `DistributedSampler` gives: five rows each, then three; an evaluation of own rows, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    whole = {"x": torch.randn(10, 4), "y": torch.randn(10, 1)}

    def rows(count: int) -> dict[str, torch.Tensor]:
        first = rank * count
        return {name: leaf[first : first + count] for name, leaf in whole.items()}

    ranks = weft.placement("cpu", [0, 1])
    program = weft.compile(model, squares, optimizer, rows(5), placement=ranks, batch="local")
    for count in (5, 3, 5):
        program.step(rows(count))
    loss: float = program.evaluation(squares, rows(5)).step(rows(5)).item()
    return loss


def own_rows_of_tensor_ranks(rank: int) -> float:
    """Rows for each rank where tensor parallelism wants the same on both."""
    strategy = weft.hybrid_parallel(["0"], ["2"])
    example = {"x": torch.randn(4, 4) + rank, "y": torch.randn(4, 1)}
    grid = weft.placement("cpu", [[0, 1]])
    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.1)
    program = weft.compile(
        model, squares, optimizer, example, placement=grid, strategy=strategy, batch="local"
    )
    return steps(program, example)


def other_weights(rank: int) -> float:
    """Each rank loads weights of its own into the live model."""
    live, batch = mlp(), pairs()
    program = compiled(live, batch)
    steps(program, batch)
    torch.manual_seed(rank)
    live.load_state_dict({name: torch.randn(x.shape) for name, x in live.state_dict().items()})
    return steps(program, batch)


def other_weights_put_right(rank: int) -> float:
    """The same, caught; then both load the same weights, and go on."""
    live, batch = mlp(), pairs()
    program = compiled(live, batch)
    whole = program.full_state_dict()
    live.load_state_dict({name: x + rank for name, x in whole.items()})
    try:
        steps(program, batch)
    except RankFailure:
        program.load_full_state_dict(whole)
        return steps(program, batch)
    return 0.0


def loaded_alone(rank: int) -> float:
    """One rank alone loads weights."""
    live, batch = mlp(), pairs()
    program = compiled(live, batch)
    whole = program.full_state_dict()
    steps(program, batch)
    if rank == 0:
        live.load_state_dict(whole)
    return steps(program, batch)


def other_whole_state(rank: int) -> float:
    """Each rank loads whole weights of its own."""
    program, _, batch = make()
    whole = program.full_state_dict()
    program.load_full_state_dict({name: x + rank for name, x in whole.items()})
    return steps(program, batch)


def other_states(rank: int) -> float:
    """Each rank puts states of its own into the optimizer."""
    program, optimizer, batch = make()
    steps(program, batch)
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["exp_avg"] = torch.full(parameter.shape, float(rank))
    return steps(program, batch)


def states_taken_out(rank: int, how: Callable[[Any, torch.Tensor], object]) -> float:
    """One rank alone takes states out of its optimizer; both do so before, which makes them anew."""
    program, optimizer, batch = make()
    steps(program, batch)
    optimizer.state.clear()
    steps(program, batch)
    if rank:
        how(optimizer.state, optimizer.param_groups[0]["params"][0])
    return steps(program, batch)


def cleared_states(rank: int) -> float:
    return states_taken_out(rank, lambda state, _: state.clear())


def popped_states(rank: int) -> float:
    return states_taken_out(rank, lambda state, parameter: state.pop(parameter))


def deleted_state(rank: int) -> float:
    return states_taken_out(rank, lambda state, parameter: state[parameter].pop("exp_avg"))


def other_rate_of_update(rank: int) -> float:
    """Rates differ in `program.update()` alone."""
    program, optimizer, batch = make()
    program.step(batch, update=False)
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    program.update()
    optimizer.param_groups[0]["lr"] = 0.1
    return steps(program, batch)


def other_tensor_rates(rank: int) -> float:
    """Rates are tensors, and differ."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1 * (rank + 1)))
    ranks = weft.placement("cpu", [0, 1])
    program = weft.compile(model, squares, optimizer, pairs(), placement=ranks)
    return steps(program, pairs())


def adds_alone(rank: int) -> float:
    """One rank alone makes a step without an update, where that is another plan."""
    strategy = replace(weft.data_parallel(), clip_norm=1.0)
    program, _, batch = make(strategy=strategy)
    steps(program, batch)
    program.step(batch, update=rank == 0)
    return steps(program, batch)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def compiled(
    model: nn.Module, example: Any, loss_fn: Any = squares, **options: Any
) -> weft.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss_fn, optimizer, example, placement=ranks, **options)


def pairs(width: int = 4) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return {name: torch.randn(width, n, generator=drawn) for name, n in (("x", 4), ("y", 1))}


def forgotten(rank: int) -> float:
    """A program that nobody closed is gone on one rank, and not on the other."""
    model = mlp()
    kept = [compiled(model, pairs(), strategy=weft.Strategy(parameters={"0.*": weft.split(0)}))]
    if rank:
        kept.clear()
        gc.collect()
    compiled(model, pairs(), strategy=weft.Strategy(parameters={"0.weight": weft.broadcast}))
    return 0.0


def forgotten_alike(rank: int) -> float:
    """The same, where the next program may lie as the first one does."""
    model = mlp()
    kept = [compiled(model, pairs(), strategy=weft.Strategy(parameters={"0.*": weft.split(0)}))]
    if rank:
        kept.clear()
        gc.collect()
    program = compiled(model, pairs(), strategy=weft.Strategy(batch={"*": weft.split(0)}))
    return steps(program, pairs())


def kept_loss(rank: int) -> float:
    model = mlp()
    kept = squares(model, pairs()) if rank else None
    program = compiled(model, pairs())
    del kept
    return steps(program, pairs())


def released_open(rank: int) -> float:
    model = mlp()
    program = compiled(model, pairs())
    if rank == 0:
        program.close()
    weft.release(model)
    return 0.0


def whole_beside_compile(rank: int) -> float:
    """One rank asks for the whole state, and the other compiles something else."""
    program, _, batch = make()
    steps(program, batch)
    if rank:
        make()
    return float(program.full_state_dict()["2.bias"])


def recovery_alone(rank: int) -> float:
    """After a step that failed, one rank steps on, and the other compiles something else."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 1))

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = model(batch["x"]).square().mean()
        return result

    program = compiled(model, {"x": torch.zeros(4, dtype=torch.int64)}, loss_fn)
    try:
        program.step({"x": torch.full((4,), 9)})
    except RankFailure:
        if rank:
            make()
    return steps(program, {"x": torch.zeros(4, dtype=torch.int64)})


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.embed(x)))
        return result


def tags_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(batch["x"]).flatten(0, 1)
    return nn.functional.cross_entropy(found, batch["y"].flatten(), ignore_index=-100)


def tags(rank: int, length: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    return {
        name: torch.randint(top, (2, length), generator=drawn)
        for name, top in (("x", 11), ("y", 5))
    }


# Of the rows that each rank brings, in one step after the other; the buckets are 8 and 16.
LENGTHS = ((5, 7), (6, 11), (16, 8))
OWN_LENGTHS: Any = {"batch": "local", "shapes": weft.Buckets((8, 16), {"x": 0, "y": -100})}


def own_lengths(rank: int) -> float:
    program = compiled(Tagger(), tags(rank, 5 + rank), tags_loss, **OWN_LENGTHS)
    loss = 0.0
    for lengths in LENGTHS:
        loss = program.step(tags(rank, lengths[rank])).item()
    return loss


def too_long(rank: int) -> float:
    program = compiled(Tagger(), tags(rank, 5), tags_loss, **OWN_LENGTHS)
    return float(program.step(tags(rank, 5 + 15 * rank)))


def other_examples(rank: int) -> float:
    compiled(Tagger(), tags(rank, 5 + 5 * rank), tags_loss, **OWN_LENGTHS)
    return 0.0


def refused(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = squares(model, batch)
    return loss * 2 if loss.item() > 1 else loss


def falls_back(rank: int) -> float:
    """A refused compile leaves DistributedDataParallel as it was; the gradient of other data on each rank."""
    wrapper = nn.parallel.DistributedDataParallel(mlp())
    with pytest.raises(weft.errors.CaptureError):
        compiled(wrapper, pairs(), refused)
    squares(wrapper, {name: leaf + rank for name, leaf in pairs().items()}).backward()  # type: ignore[no-untyped-call]
    gradient: float = wrapper.module[0].weight.grad.sum().item()
    kept = squares(wrapper, pairs())
    with pytest.raises(weft.errors.UserError, match="needs its values"):
        compiled(wrapper, pairs())
    del kept
    with pytest.raises(weft.errors.UserError, match="wrap the model again"):
        wrapper(pairs()["x"])
    wrapper.zero_grad()
    compiled(wrapper, pairs())
    wrapper(pairs()["x"])
    return gradient


UPDATES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
}


def staged_updates(rank: int) -> float:
    """Eager steps of optimizers between those of a pipeline: how far parameters differ from plain ones."""
    worst, ranks = 0.0, weft.placement("cpu", [0, 1])
    staged = weft.Strategy(batch={"*": weft.split(0)}, stages=2)
    for make_optimizer in UPDATES.values():
        model, plain = mlp().double(), mlp().double()
        optimizer, other = make_optimizer(model.parameters()), make_optimizer(plain.parameters())
        batch = {name: leaf.double() for name, leaf in pairs().items()}
        program = weft.compile(model, squares, optimizer, batch, placement=ranks, strategy=staged)
        program.step(batch)
        for _ in range(2):
            eager_step(model, optimizer, batch, squares)
        program.step(batch)
        for _ in range(4):
            eager_step(plain, other, batch, squares)
        for key, value in program.full_state_dict().items():
            worst = max(worst, (value - plain.state_dict()[key]).abs().max().item())
        program.close()
    return worst


def going_on(fail: Callable[[], Any]) -> float:
    """What is refused on one rank raises on both, and both compile and step together afterwards."""
    try:
        fail()
    except Exception as error:
        steps(compiled(mlp(), pairs()), pairs())
        raise error from None
    return 0.0


def captured_alone(rank: int) -> float:
    return going_on(lambda: compiled(mlp(), pairs(), refused if rank else squares))


def asked_alone(rank: int) -> float:
    return going_on(lambda: compiled(mlp(), pairs(), metrics=["loss"] if rank else []))


def other_micro_batches(rank: int) -> float:
    strategy = replace(weft.data_parallel(), micro_batches=2 + 2 * rank)
    return going_on(lambda: compiled(mlp(), pairs(8), strategy=strategy))


def other_placement(rank: int) -> float:
    ranks = weft.placement("cpu", [[0, 1]] if rank else [0, 1])
    return going_on(lambda: weft.compile(mlp(), squares, None, pairs(), placement=ranks))


def other_version(rank: int) -> float:
    with patch.object(torch, "__version__", TorchVersion(f"2.{11 + rank}.0")):
        try:
            compiled(mlp(), pairs())
        except UserError as error:
            found = error
    return going_on(lambda: _raised(found))


def _raised(error: Exception) -> None:
    raise error


def other_strategy(rank: int) -> float:
    strategy = weft.Strategy(parameters={"0.*": weft.split(0) if rank else weft.broadcast})
    return going_on(lambda: compiled(mlp(), pairs(), strategy=strategy))


def other_option(rank: int) -> float:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=bool(rank))
    ranks = weft.placement("cpu", [0, 1])
    return going_on(lambda: weft.compile(model, squares, optimizer, pairs(), placement=ranks))


def other_groups(rank: int) -> float:
    model = mlp()
    layers = [{"params": model[i].parameters()} for i in (0, 2)]
    optimizer = torch.optim.Adam(layers[::-1] if rank else layers)
    ranks = weft.placement("cpu", [0, 1])
    return going_on(lambda: weft.compile(model, squares, optimizer, pairs(), placement=ranks))


def frozen_alone(rank: int) -> float:
    model = mlp()
    model[0].weight.requires_grad_(not rank)
    return going_on(lambda: compiled(model, pairs()))


def other_width(rank: int) -> float:
    model = nn.Sequential(nn.Linear(4, 8 + rank), nn.Tanh(), nn.Linear(8 + rank, 1))
    return going_on(lambda: compiled(model, pairs()))


def other_batch_at_compile(rank: int) -> float:
    return going_on(lambda: compiled(mlp(), pairs(4 + 4 * rank)))


def other_loss(rank: int) -> float:
    def sums(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = (model(batch["x"]) - batch["y"]).square().sum()
        return result

    return going_on(lambda: compiled(mlp(), pairs(), sums if rank else squares))


def other_number(rank: int) -> float:
    def scaled(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return squares(model, batch) * (rank + 2)

    return going_on(lambda: compiled(mlp(), pairs(), scaled))


def without_loss(rank: int) -> float:
    ranks = weft.placement("cpu", [0, 1])
    loss_fn = None if rank else squares
    return going_on(lambda: weft.compile(mlp(), loss_fn, None, pairs(), placement=ranks))


def misnamed_alone(rank: int) -> float:
    misnamed = weft.Strategy(parameters={"1.weight" if rank else "0.weight": weft.split(0)})
    return going_on(lambda: compiled(mlp(), pairs(), strategy=misnamed))


def state_of_one(rank: int) -> float:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shape = (4, 8) if rank else (8, 4)
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.zeros(shape)  # type: ignore[index]
    ranks = weft.placement("cpu", [0, 1])
    return going_on(lambda: weft.compile(model, squares, optimizer, pairs(), placement=ranks))


class Filled(nn.Linear):
    """Cannot be filled on one rank."""

    fails = False

    def reset_parameters(self) -> None:
        if self.fails and not self.weight.is_meta:
            raise ValueError("no weights for this layer")
        super().reset_parameters()


def filled_alone(rank: int) -> float:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Filled(4, 1))
    model[1].fails = rank == 1  # type: ignore[assignment]
    return going_on(lambda: compiled(model, pairs()))


def started_alone(rank: int) -> float:
    def fail(*arguments: Any) -> None:
        raise OSError("no room for kernels")

    def start() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr("weft.program.planning.build._executor", fail)
            compiled(mlp(), pairs())

    return going_on(start)


def other_shape_alone(rank: int) -> float:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        narrow = len(batch["x"]) < 4
        return (refused if rank and narrow else squares)(model, batch)

    program = compiled(mlp(), pairs(), loss_fn)
    steps(program, pairs())
    return going_on(lambda: program.step(pairs(2)))


def evaluated_alone(rank: int) -> float:
    program = compiled(mlp(), pairs())
    return going_on(lambda: program.evaluation(refused if rank else squares, pairs()))


def held_alone(rank: int) -> float:
    """The step without an update is planned when it is first wanted, where gradients are clipped."""
    number = [0.0]

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (refused if number[0] else squares)(model, batch)

    program = compiled(mlp(), pairs(), loss_fn, strategy=weft.Strategy(clip_norm=1.0))
    number[0] = float(rank)
    return going_on(lambda: program.step(pairs(), update=False))


PAIR, TURNED = weft.placement("cpu", [0, 1]), weft.placement("cpu", [1, 0])


def beside_a_step(rank: int, eager: Callable[[], object]) -> float:
    """Rank 0 runs eager code where rank 1 steps."""
    program, _, batch = make()
    steps(program, batch)
    if rank == 0:
        eager()
    return steps(program, batch)


def eager_alone(rank: int) -> float:
    """In a communicator that is open."""
    made = weft.ones(4, placement=PAIR, sbp=weft.partial())
    return beside_a_step(rank, made.full)  # type: ignore[attr-defined]


def first_use_alone(rank: int) -> float:
    """In one that is not."""
    return beside_a_step(rank, lambda: weft.ones(4, placement=TURNED, sbp=weft.broadcast))


def seeded_alone(rank: int) -> float:
    """The first draw from a seed compares it."""

    def draw() -> None:
        weft.manual_seed(3)
        weft.rand(4, placement=PAIR, sbp=weft.broadcast)

    return beside_a_step(rank, draw)


def eager_late(rank: int) -> float:
    """A rank that comes late to eager code is waited for, between the same steps, and is told nothing."""
    program, _, batch = make()
    made, loss = weft.ones(4, placement=PAIR, sbp=weft.partial()), 0.0
    for turn in range(2):
        until = time.monotonic() + 1.5 * PATIENCE * (rank == turn)
        while time.monotonic() < until:
            torch.ones(100).exp()
        made.full()  # type: ignore[attr-defined]
        until = time.monotonic() + 1.5 * PATIENCE * (rank != turn)
        while time.monotonic() < until:
            torch.ones(100).exp()
        loss = steps(program, batch)
    return loss


def other_ops_put_right(rank: int) -> float:
    """Eager ops differ before a step that fails on both ranks; what comes after is compared anew."""
    program, _, batch = make()
    made = weft.ones(4, placement=PAIR, sbp=weft.partial())
    made * (2.5 + rank)
    try:
        steps(program, {"x": batch["x"] + rank, "y": batch["y"]})
    except RankFailure:
        return made.full().sum().item()  # type: ignore[attr-defined, no-any-return]
    return 0.0


def interrupted(rank: int) -> float:
    """One rank is interrupted in a step, before any update; both go on."""
    program, _, batch = make()
    steps(program, batch, 1)
    program.full_state_dict()  # both have ended the first step

    def stop(self: ThreadExecutor, step: int) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(ThreadExecutor, "_run", stop)
        with pytest.raises(KeyboardInterrupt if rank else RankFailure):
            steps(program, batch)
    return steps(program, batch, 1)


def two_steps(rank: int) -> float:
    program, _, batch = make()
    return steps(program, batch, 2)


def forked(rank: int) -> float:
    """A process that is forked from a rank is told, and takes nothing away from it; gives how often it was told."""
    model, batch = mlp(), pairs()
    program = compiled(model, batch)
    steps(program, batch)
    made = weft.ones(4, placement=PAIR, sbp=weft.partial())
    child = os.fork()
    if child == 0:
        weft.manual_seed(7)
        calls = [
            lambda: steps(program, batch),
            lambda: program.full_state_dict(),
            lambda: program.close(),
            made.full,  # type: ignore[attr-defined]
            lambda: weft.ones(4, placement=TURNED, sbp=weft.broadcast),
            lambda: weft.rand(4, placement=PAIR, sbp=weft.broadcast),
            lambda: compiled(model, batch),
            lambda: weft.release(model),
        ]
        told = sum(was_told_of_the_fork(call) for call in calls)
        del calls, program
        gc.collect()
        os._exit(told)
    told = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    steps(program, batch)
    assert made.full().sum() == 4  # type: ignore[attr-defined]
    return told


def was_told_of_the_fork(call: Callable[[], object]) -> bool:
    try:
        call()
    except weft.errors.UserError as error:
        return "was forked from the one that has the ranks" in str(error)
    return False


CASES: tuple[Callable[[int], float], ...] = (
    rates,
    numbers,
    other_outside,
    written_outside,
    written_outside_by_numpy,
    updates,
    other_batch,
    other_seed_of_a_loader,
    one_label,
    long_batch,
    other_shape,
    skipped,
    state_alone,
    two_programs,
    own_rows,
    own_rows_of_tensor_ranks,
    other_weights,
    other_weights_put_right,
    loaded_alone,
    other_whole_state,
    other_states,
    cleared_states,
    popped_states,
    deleted_state,
    other_rate_of_update,
    other_tensor_rates,
    adds_alone,
    forgotten,
    forgotten_alike,
    kept_loss,
    released_open,
    recovery_alone,
    whole_beside_compile,
    own_lengths,
    too_long,
    other_examples,
    falls_back,
    staged_updates,
    captured_alone,
    asked_alone,
    other_micro_batches,
    other_placement,
    other_strategy,
    other_version,
    other_option,
    other_groups,
    frozen_alone,
    other_width,
    other_batch_at_compile,
    other_loss,
    other_number,
    without_loss,
    misnamed_alone,
    state_of_one,
    filled_alone,
    started_alone,
    other_shape_alone,
    evaluated_alone,
    held_alone,
    eager_alone,
    first_use_alone,
    seeded_alone,
    eager_late,
    other_ops_put_right,
    interrupted,
    two_steps,
    forked,
)


# Those that are run over sockets, too.
OVER_GLOO = (rates, other_batch, skipped, eager_alone, first_use_alone, eager_late, forked)
# And by what ranks on GPUs have, with Gloo in place of NCCL: no message has room for a stamp, and nobody looks around
# while one waits.
AS_NCCL = (
    *(rates, numbers, updates, other_batch, other_seed_of_a_loader, one_label, long_batch),
    *(other_weights, other_states, other_rate_of_update, own_rows_of_tensor_ranks, skipped),
    *(other_shape, other_shape_alone, other_weights_put_right, two_steps),
)


def as_nccl() -> None:
    """Have ranks talk as those on GPUs do."""
    BACKENDS["cpu"] = replace(
        BACKENDS["cpu"], process_channel=NcclChannel, shares_memory=False, streams=Inline
    )


def child(case: Callable[[int], float], rank: int, folder: Path) -> None:
    signal.alarm(LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    started, error, loss = time.monotonic(), "", 0.0
    try:
        loss = case(rank)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    outcome = [time.monotonic() - started, error, loss]
    current_world().close()  # as when a process ends
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


def started(case: Callable[[int], float], transport: str, folder: Path) -> set[int]:
    """The two processes of a case, by their ids."""
    children = set()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                if transport == "nccl":
                    as_nccl()
                else:
                    os.environ[TRANSPORT] = transport
                child(case, rank, folder)
            finally:
                os._exit(0)
        children.add(pid)
    return children


def written(folder: Path) -> dict[str, Any]:
    files = {str(rank): folder / f"{rank}.json" for rank in range(2)}
    return {rank: json.loads(path.read_text()) for rank, path in files.items() if path.exists()}


def run(cases: dict[str, tuple[Callable[[int], float], str]]) -> dict[str, dict[str, Any]]:
    """All cases, a few at a time: most of one is waiting for the other rank."""
    waiting, running = list(cases), dict[str, set[int]]()
    with tempfile.TemporaryDirectory() as name:
        while waiting or running:
            while waiting and len(running) < AT_A_TIME:
                case = waiting.pop(0)
                Path(name, case).mkdir()
                running[case] = started(*cases[case], Path(name, case))
            ended, _ = os.wait()
            for children in running.values():
                children.discard(ended)
            running = {case: children for case, children in running.items() if children}
        return {case: written(Path(name, case)) for case in cases}


def warm() -> None:
    """One program here, so that what is looked up once is there in all processes that are forked."""
    with weft.local_world(2):
        program, _, batch = make()
        steps(program, batch)
        program.close()
    assert threading.active_count() == 1, "a process with threads cannot be forked"


if __name__ == "__main__":
    warm()
    every = {case.__name__: (case, "shared") for case in CASES}
    every |= {f"{case.__name__} over gloo": (case, "gloo") for case in OVER_GLOO}
    every |= {f"{case.__name__} as nccl": (case, "nccl") for case in AS_NCCL}
    names = sys.argv[1:]
    if names[:1] == ["--without"]:
        names = [name for name in every if name not in names]
    every = {name: every[name] for name in names or every}
    sys.stdout.write(json.dumps(run(every)))
