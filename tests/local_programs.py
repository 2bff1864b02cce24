"""Small local programs, built by hand, for the tests of the passes that turn them into actors."""

from __future__ import annotations

import build
from build import refs, value
from weft.ir.plan import (
    Collective,
    LocalCall,
    LocalInput,
    LocalNode,
    LocalOutput,
    LocalProgram,
    LocalUpdate,
)


def call(output: str, *inputs: str, op: str = "aten.add.Tensor") -> LocalCall:
    return build.call(op, refs(*inputs), output)


def all_reduce(output: str, source: str, communicator: int = 0, size: int = 32) -> Collective:
    return Collective("all_reduce", communicator, value(source), value(output), bytes=size)


def gather(output: str, source: str, communicator: int = 0) -> Collective:
    return Collective(
        "all_gather", communicator, value(source), value(output, 8), sizes=(4, 4), bytes=16
    )


def reduce_scatter(output: str, source: str) -> Collective:
    """Of 8 elements into 4."""
    whole = value(source, 8)
    return Collective("reduce_scatter", 0, whole, value(output), sizes=(4, 4), bytes=32)


def update(target: str, source: str) -> LocalUpdate:
    return LocalUpdate("SGD", target, source, (), 0, f"model.{target}")


def program(nodes: list[LocalNode], outputs: tuple[str, ...] = ("loss",)) -> LocalProgram:
    """Two parameters v and w, one batch leaf x."""
    inputs = tuple(LocalInput(value(name), "parameter", f"model.{name}") for name in "vw")
    batch = LocalInput(value("x"), "batch", "x")
    return LocalProgram(
        0, (*inputs, batch), tuple(nodes), tuple(LocalOutput(name, name) for name in outputs)
    )


def training_step() -> LocalProgram:
    """Forward, backward with two gradients that are reduced, two updates."""
    return program(
        [
            call("h", "x", "v"),
            call("loss", "h", "w"),
            call("gw", "h", "loss"),
            all_reduce("gw.sum", "gw"),
            call("gh", "w", "loss"),
            call("gv", "gh", "x"),
            all_reduce("gv.sum", "gv"),
            update("v", "gv.sum"),
            update("w", "gw.sum"),
        ]
    )
