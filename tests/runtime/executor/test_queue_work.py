"""The executor of a queue's thread: inputs, outputs and times of its acts."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor

from weft.actors import Act, Begin, QueueMachine
from weft.ir.plan import Compute, LocalValue, RankPlan, Register
from weft.runtime.executor.queues import ActError, QueueWork
from weft.runtime.executor.work import Work


def register(name: str, producer: int, *consumers: int) -> Register:
    return Register(LocalValue(name, (1,), "float32"), "activation", producer, consumers)


def machine() -> QueueMachine:
    """x of another queue is read by 1 and 2; 1 makes y, which 2 reads."""
    actors = (
        Compute(0, (), (), ("x",), "host"),
        Compute(1, (), ("x",), ("y",)),
        Compute(2, (), ("x", "y"), ()),
    )
    plan = RankPlan(0, (), actors, (register("x", 0, 1, 2), register("y", 1, 2)))
    return QueueMachine(plan, "compute")


def double(step: int, micro: int, inputs: list[Tensor]) -> list[Tensor]:
    return [2 * inputs[0]]


def refuse(step: int, micro: int, inputs: list[Tensor]) -> list[Tensor]:
    raise ValueError(f"{len(inputs)} inputs")


def test_an_act_is_done_and_timed_where_it_starts() -> None:
    queue, ticks = machine(), count(10)
    queue.handle(Begin(0))
    host = QueueWork(queue, {})
    works = {1: Work(("x",), ("y",), double), 2: Work(("x", "y"), (), refuse)}
    work = QueueWork(queue, works, clock=lambda: next(ticks))
    host.tensors["x", 0] = torch.tensor(3.0)
    host.hand_on("x", 0, work)
    host.hand_on("variable", 0, work)
    host.free("x", 0)
    assert host.tensors == {}
    # Somebody else on the queue has yet to read x.
    queue._ports["x"].local[0] = 2
    assert work.start(Act(1, 0))
    assert work.spans == [(Act(1, 0), 10, 11)]
    assert {key: tensor.item() for key, tensor in work.tensors.items()} == {
        ("x", 0): 3.0,
        ("y", 0): 6.0,
    }
    # The last reader takes the queue's references along.
    queue._ports["x"].local[0] = queue._ports["y"].local[0] = 1
    with pytest.raises(ActError) as error:
        work.start(Act(2, 0))
    assert error.value.act == Act(2, 0)
    assert str(error.value.__cause__) == "2 inputs"
    assert work.tensors == {}
