"""Every function and class that `import weft` offers, with arguments that are right, and values that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import weft


class Odd:
    """A value of no known type."""


def wrong_values() -> list[Any]:
    """Values that few arguments take; each call gets new ones."""
    return [
        None,
        True,
        -1,
        0,
        10**15,
        10**400,
        1.5,
        float("nan"),
        "",
        "x",
        "0",
        b"x",
        [],
        [None],
        ["x"],
        [[0], [1, 2]],
        [10**15],
        (),
        {},
        {"x": 1},
        {1: 2},
        {"*": None},
        set(),
        Odd(),
        lambda *_: 0,
        torch.float32,
        torch.ones(2),
        torch.ones(2, device="meta"),
        nn.Linear(2, 2),
        int,
        weft.split(0),
        weft.placement("cpu", [0, 1]),
        weft.placement("cpu", [7, 9]),
        iter([0]),
        range(3),
        ValueError("x"),
    ]


@dataclass(frozen=True)
class ApiCall:
    """A call with arguments that are right.

    Attributes:
        name: of the function.
        function: that is called.
        arguments: by name, in their order.
        positional: how many of them are given by position.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    positional: int = 0

    def run(self, **changed: Any) -> Any:
        """Make the call; a context manager is entered and left, a program closed."""
        values = {**self.arguments, **changed}
        names = list(values)
        first = [values.pop(name) for name in names[: self.positional]]
        found = self.function(*first, **values)
        with ExitStack() as stack:
            if hasattr(found, "__enter__") and not isinstance(found, Tensor):
                stack.enter_context(found)
            if isinstance(found, weft.Program):
                found.close()
        return found


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def training() -> dict[str, Any]:
    """A model with what trains it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "loss_fn": loss,
        "optimizer": optimizer,
        "example_batch": torch.ones(4, 4),
    }


def api_calls() -> Iterator[Callable[[], ApiCall]]:
    """Makers of calls: objects that a call takes over are made anew for each."""
    where = weft.placement("cpu", [0, 1])
    made = {"placement": where, "sbp": weft.split(0), "dtype": None, "requires_grad": False}

    def with_training(name: str, **more: Any) -> ApiCall:
        return ApiCall(name, getattr(weft, name), {**training(), **more})

    loading = {
        "dataset": [torch.ones(2)],
        "batch_size": 1,
        "program": None,
        "shuffle": False,
        "seed": 0,
        "workers": 0,
        "collate_fn": None,
        "drop_last": False,
        "sampler": None,
        "ahead": 2,
        "split": True,
        "lengths": None,
    }
    yield lambda: ApiCall("Loader", weft.Loader, loading)
    packing = {"texts": [[1, 2, 3]], "length": 2, "lengths": None, "key": "input_ids"}
    yield lambda: ApiCall("Packed", weft.Packed, packing)
    kept = {"path": "kept", "every": 2, "keep": 2, "wait": True}
    yield lambda: ApiCall("Checkpoints", weft.Checkpoints, kept)
    named = {"path": "kept", "names": {"^": "model."}, "strict": False}
    yield lambda: ApiCall("Weights", weft.Weights, named)
    compiled = {
        "placement": where,
        "strategy": None,
        "seed": None,
        "kernels": "aten",
        "batch": "whole",
        "metrics": (),
        "shapes": None,
        "verify": False,
        "weights": None,
    }
    yield partial(with_training, "compile", **compiled)
    yield partial(with_training, "Step")
    yield partial(with_training, "Job")

    def release() -> ApiCall:
        found = training()
        return ApiCall("release", weft.release, {n: found[n] for n in ("model", "optimizer")})

    yield release

    def distribute() -> ApiCall:
        arguments = {"module": training()["model"], "placement": where, "layouts": None}
        return ApiCall("distribute", weft.distribute, arguments)

    yield distribute

    def simulate(name: str, **more: Any) -> ApiCall:
        step = weft.Step(*training().values())
        topology = {"topology": "h100x2", **more}
        return ApiCall(name, getattr(weft, name), {"step": step, **topology})

    yield partial(simulate, "simulate", strategy=None, grid=(), costs=None)
    searched = {"seconds": 0.01, "fixed": None, "start": None, "memory_limit": None, "seed": 0}
    more = {"moves": 1, "every_rank": False, "planners": 1, "told": lambda *_: None}
    yield partial(simulate, "search", **searched, **more)

    plain: dict[str, dict[str, Any]] = {
        "hint": {"x": torch.ones(4), "sbp": weft.split(0)},
        "stage": {"index": 0},
        "Placement": {"device_type": "cpu", "shape": (2,), "ranks": (0, 1)},
        "partial": {"reduction": "sum"},
        "placement": {"device_type": "cpu", "ranks": [0, 1]},
        "split": {"dim": 0},
        "rule": {"ops": "nowhere.op.default", "factors": "a -> a"},
        "Buckets": {"sizes": [8, 16], "values": {"*": 0.0}, "dim": 1},
        "local_world": {"size": 2, "device_type": "cpu", "timeout": 9.0},
        "Auto": {
            "seconds": 1.0,
            "memory_limit": None,
            "fixed": None,
            "seed": 0,
            "moves": None,
            "measure": 0,
        },
        "Precision": {
            "compute": "bf16",
            "parameters": None,
            "reduce": None,
            "accumulate": "fp32",
            "masters": False,
            "activations": None,
        },
        "Stage": {"patterns": ["0"], "placement": where},
        "Strategy": {each: getattr(weft.Strategy(), each) for each in weft.Strategy().__dict__},
        "Zero": {"level": 1, "axis": 0},
        "context_parallel": {
            "sequence": 1,
            "data": False,
            "columns": (),
            "rows": (),
            "whole": (),
        },
        "data_parallel": {},
        "expert_parallel": {"experts": ["0"], "capacity": None},
        "hybrid_parallel": {"columns": ["0"], "rows": (), "sequence": None},
        "tensor_parallel": {"columns": ["0"], "rows": (), "sequence": None},
        "check_every_op": {},
        "strict_boxing": {},
        "manual_seed": {"seed": 0},
        "tensor": {"data": torch.ones(4), **made},
        "from_local": {"shard": {0: torch.ones(2), 1: torch.ones(2)}, **_first(made), "shape": [4]},
        "full": {"size": [4], "value": 1.0, **made},
        "from_dtensor": {"x": None},
        "to_dtensor": {"x": None},
        "whole": {"value": [torch.ones(2)]},
    }
    for name, arguments in plain.items():
        yield partial(ApiCall, name, getattr(weft, name), arguments)
    for name in ("ones", "zeros", "empty", "rand", "randn", "arange"):
        yield partial(ApiCall, name, getattr(weft, name), {"size": 4, **made}, 1)


def _first(made: Mapping[str, Any]) -> dict[str, Any]:
    return {name: made[name] for name in ("placement", "sbp")}
