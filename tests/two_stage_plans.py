"""Hand-written plans of micro-batches: what they are made of, and a pipeline of two ranks."""

from __future__ import annotations

import torch

from build import ref
from weft.ir.logical import PerMicroBatch
from weft.ir.plan import (
    Communicate,
    Communicator,
    Compute,
    Feed,
    Fetch,
    LocalCall,
    LocalInput,
    LocalUpdate,
    LocalValue,
    Order,
    RankPlan,
    Register,
    Transfer,
)

M, ROWS, WIDTH = 4, 2, 3
EACH = PerMicroBatch(tuple(range(M)))


def value(name, *shape, dtype="float64"):
    return LocalValue(name, shape, dtype)


def call(op, args, output):
    return LocalCall.of(op, args, (output,))


def select(name, output):
    return call("aten.select.int", (ref(name), 0, EACH), output)


def accumulate(name, output, reduction="sum"):
    return call("weft.accumulate", (ref(name), reduction), output)


def loop(id, nodes, consumes, produces, priority=0):
    return Compute(id, nodes, consumes, produces, acts=M, priority=priority)


def each(value, producer, consumers, credits=1, kind="activation", full=False):
    return Register(value, kind, producer, consumers, credits, full, rate=M)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# A pipeline of two ranks: y = x a on rank 0, loss = sum((y b)^2) on rank 1, and back.
FORTH, BACK = Communicator(0, (0, 1)), Communicator(1, (1, 0))
WHOLE = tuple((0, size) for size in (ROWS, WIDTH))


def mm(left, right, output):
    return call("aten.mm.default", (ref(left), ref(right)), output)


def turned(name, *shape):
    return call("aten.t.default", (ref(name),), value(f"{name}_t", *shape))


def send(id, communicator, name):
    transfer = Transfer(communicator, value(name, ROWS, WIDTH), None, ((1, WHOLE),), (), 48)
    return Communicate(id, (transfer,), f"comm:{communicator}", M)


def receive(id, communicator, name):
    transfer = Transfer(communicator, None, value(name, ROWS, WIDTH), (), ((0, WHOLE),), 48)
    return Communicate(id, (transfer,), f"comm:{communicator}", M)


def update(id, name, gradient):
    return Compute(id, (LocalUpdate("SGD", name, gradient, (), 0, name),), (gradient,), (name,))


def orders(*actors):
    return tuple(
        Order(actor.queue, tuple((actor.id, micro) for micro in range(M))) for actor in actors
    )


def first_stage(credits, backward_first):
    x, a, y, dy = (
        value("x", M, ROWS, WIDTH), value("a", WIDTH, WIDTH), value("y", ROWS, WIDTH), value("dy", ROWS, WIDTH),
    )  # fmt: skip
    part, da, total = (
        value("part", ROWS, WIDTH),
        value("da", WIDTH, WIDTH),
        value("total", WIDTH, WIDTH),
    )
    forward = loop(1, (select("x", part), mm("part", "a", y)), ("x", "a"), ("part", "y"), 1)
    backward = (
        turned("part", WIDTH, ROWS),
        mm("part_t", "dy", da),
        accumulate("da", total),
    )
    forth, back = send(2, 0, "y"), receive(3, 1, "dy")
    return RankPlan(
        0,
        (LocalInput(a, "parameter", "a"), LocalInput(x, "batch", "x")),
        (
            Feed(0, ("x",), ("x",)),
            forward,
            forth,
            back,
            loop(4, backward, ("part", "dy"), ("total",), 0 if backward_first else 2),
            update(5, "a", "total"),
        ),
        (
            Register(x, "batch", 0, (1,)),
            each(part, 1, (4,), credits),
            each(y, 1, (2,)),
            each(dy, 3, (4,), 1, "communication"),
            Register(total, "gradient", 4, (5,)),
            Register(a, "parameter", 5, (1,), 1, True),
        ),
        M,
        orders(forth, back),
    )  # fmt: skip


def last_stage(credits, backward_first):
    b, y, dy, z = (
        value("b", WIDTH, WIDTH), value("y", ROWS, WIDTH), value("dy", ROWS, WIDTH), value("z", ROWS, WIDTH),
    )  # fmt: skip
    square, part, loss = value("square", ROWS, WIDTH), value("part"), value("loss")
    twice, db, total = (
        value("twice", ROWS, WIDTH),
        value("db", WIDTH, WIDTH),
        value("total", WIDTH, WIDTH),
    )
    forward = (
        mm("y", "b", z),
        call("aten.mul.Tensor", (ref("z"), ref("z")), square),
        call("aten.sum.default", (ref("square"),), part),
        accumulate("part", loss),
    )
    backward = (
        call("aten.mul.Tensor", (ref("z"), 2.0), twice),
        turned("b", WIDTH, WIDTH),
        mm("twice", "b_t", dy),
        turned("y", WIDTH, ROWS),
        mm("y_t", "twice", db),
        accumulate("db", total),
    )
    forth, back = receive(0, 0, "y"), send(1, 1, "dy")
    return RankPlan(
        1,
        (LocalInput(b, "parameter", "b"),),
        (
            forth,
            back,
            loop(2, forward, ("y", "b"), ("z", "loss"), 1),
            loop(3, backward, ("y", "z", "b"), ("dy", "total"), 0 if backward_first else 2),
            update(4, "b", "total"),
            Fetch(5, ("loss",), ("loss",)),
        ),
        (
            each(y, 0, (2, 3), credits, "communication"),
            each(z, 2, (3,), credits),
            each(dy, 3, (1,)),
            Register(loss, "activation", 2, (5,)),
            Register(total, "gradient", 3, (4,)),
            Register(b, "parameter", 4, (2, 3), 1, True),
        ),
        M,
        orders(forth, back),
    )  # fmt: skip


def plain_steps(batches, a, b):
    """Losses of gradient descent on the whole batches; moves `a` and `b`."""
    losses = []
    weights = [torch.nn.Parameter(tensor) for tensor in (a, b)]
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.5)
    for batch in batches:
        loss = (batch.view(M * ROWS, WIDTH) @ weights[0] @ weights[1]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
