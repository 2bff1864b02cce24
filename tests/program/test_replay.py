"""Segments as graphs: with a stand-in for CUDA's, they train as segments that are launched call by call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from inline_streams import Inline
from models import GPT, token_batch, token_loss
from single_device import adamw
from weft.compiler.plans.specialize import with_cuda_graphs
from weft.hardware import default_device
from weft.ir.plan import Communicate, RankPlan
from weft.program.planning import build
from weft.runtime.devices.backend import BACKENDS
from weft.runtime.devices.cuda_graphs import GraphCapture, GraphRunner, capture_obstacle

pytestmark = pytest.mark.usefixtures("double_precision")

STRATEGIES = {
    "tensor": weft.tensor_parallel(["blocks.*.qkv", "blocks.*.up"], ["blocks.*.proj"]),
    "pipeline": weft.Strategy(stages=2, micro_batches=4, schedule="1f1b"),
    "shards in micro-batches": weft.Strategy(
        batch={"*": weft.split(0)}, zero=weft.Zero(level=3), micro_batches=2
    ),
}


class Recording(TorchDispatchMode):
    """Notes ops with the very tensors that they work on; what they compute is not to be had yet."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.ops.append((func, args, kwargs, []))
            return kwargs.get("out", args[0] if args else None)
        result = func(*args, **kwargs)
        given = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in made if storage(tensor) not in given]
        self.ops.append((func, args, kwargs, fresh if len(fresh) == len(made) else []))
        spoil(fresh)
        return result

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.ops:
            result = func(*args, **kwargs)
            for place, leaf in zip(fresh, tree_leaves(result) if fresh else [], strict=True):
                place.copy_(leaf)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)


class StandIn(GraphCapture):
    """As CUDA's graphs: the same ops on the same memory, and nothing of Python, run again."""

    def __init__(self, waits: str = "") -> None:
        self.launches = 0
        self.unheld_tensors: list[Tensor] = []
        self.waits = waits

    def capture(
        self, function: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        with Recording() as recording:
            outputs = function()

        def launch() -> None:
            self.launches += 1
            recording.replay()

        return launch, outputs

    def unheld(self, tensor: Tensor) -> Tensor:
        self.unheld_tensors.append(tensor)
        return tensor

    @contextmanager
    def host_waits(self) -> Iterator[list[str]]:
        found: list[str] = []
        yield found
        found += [self.waits] if self.waits else []


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """The tapes of programs compiled from now on, which replay what they can."""
    made: list[StandIn] = []

    def make(setting: Any, compiled: Any, plan: Any, device: torch.device) -> GraphRunner:
        made.append(StandIn())
        (program,) = (each for each in compiled.programs if each.rank == plan.rank)
        marked, found = with_cuda_graphs(
            plan, program, default_device("cuda"), "always", capture_obstacle
        )
        return GraphRunner(marked, found, made[-1], device, setting.seed)

    monkeypatch.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], streams=Inline))
    monkeypatch.setattr(build, "make_graph_runner", make)
    return made


def exchanges(plan: RankPlan) -> list[Communicate]:
    return [actor for actor in plan.actors if isinstance(actor, Communicate)]


def compiled(model: torch.nn.Module, strategy: weft.Strategy, loss: Any, batch: Any) -> Any:
    placement = weft.placement("cpu", [0, 1])
    return weft.compile(
        model, loss, adamw(model), batch, placement=placement, strategy=strategy, seed=7
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_replayed_segments_train_as_one_device(name: str, tapes: list[StandIn]) -> None:
    model = GPT()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with weft.local_world(2, timeout=30):
        program = compiled(model, STRATEGIES[name], token_loss, token_batch(8))
        found: list[tuple[Tensor, Tensor]] = []
        for seed in range(5):
            batch = token_batch(8, seed=seed)
            optimizer.zero_grad()
            expected = token_loss(plain, batch)
            expected.backward()
            optimizer.step()
            found.append((program.step(batch), expected.detach()))
            # Between two steps nobody needs what graphs have made.
            for tape, executor in zip(tapes, program._core.executors.values(), strict=True):
                lasting = {storage(each) for each in executor._rank.variables.values()}
                spoil([each for each in tape.unheld_tensors if storage(each) not in lasting])
        assert "replayed" in program.explain(details=True)
    # Results of earlier steps are not overwritten by later ones.
    for own, expected in found:
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
    # From the third step on; in the third one what was captured is launched, too.
    for tape, executor in zip(tapes, program._core.executors.values(), strict=True):
        chosen = executor.plan.replayed
        acts = sum(executor.plan.actors[actor].acts for actor in chosen)
        assert tape.launches == 3 * acts > 0
        # What communications read must not be given out again.
        sent = {name for one in exchanges(executor.plan) for name in one.consumes}
        assert all(executor.replayer.leaves(name) for name in sent)
        assert tape.unheld_tensors


def test_replayed_dropout_draws_anew_in_every_step(
    tapes: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(16, 1)
    )
    batch = {"x": torch.ones(4, 8)}
    strategy = weft.Strategy(batch={"*": weft.split(0)}, micro_batches=2)

    def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().mean()

    with weft.local_world(2, timeout=30):
        replayed = compiled(copy.deepcopy(model), strategy, loss, batch)
        monkeypatch.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], streams=None))
        launched = compiled(copy.deepcopy(model), strategy, loss, batch)
        losses = [(replayed.step(batch), launched.step(batch)) for _ in range(6)]
    assert all(tape.launches > 0 for tape in tapes)
    assert all(torch.equal(*pair) for pair in losses)


def test_a_segment_in_which_the_host_waits_stays_as_it_is(tapes: list[StandIn]) -> None:
    with weft.local_world(2, timeout=30):
        program = compiled(GPT(), STRATEGIES["tensor"], token_loss, token_batch(8))
        for tape in tapes:
            tape.waits = "called a synchronizing operation"
        for _ in range(4):
            program.step(token_batch(8))
        text = program.explain(details=True)
    assert not any(tape.launches for tape in tapes)
    assert "the host waits in it: called a synchronizing operation" in text
