"""Seconds of an optimizer's updates, for variables of several sizes.

They run as those of a segment do (`weft.runtime.executor.optimizer`): the user's options, as many variables of one
size at once as a small segment has. Between two tries as much is read as a step holds: an update finds its variables,
and its own code, where the step has left them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from weft.hardware.measured import SizedSample
from weft.ir.plan import LocalUpdate
from weft.runtime.executor.optimizer import OptimizerUpdates
from weft.runtime.measured.stopwatch import COLD, Took, finish, took_in_turns
from weft.runtime.memory.state import Variables
from weft.units import NO_BYTES, Bytes, Seconds

# Elements of a variable, and how many there are of each size.
_ELEMENTS = (2**6, 2**10, 2**14, 2**18, 2**20, 2**22)
_TOGETHER, _MOST = 16, 2**23
# Of a variable, its gradient and two states, for each element.
_BYTES = 16


def measured_updates(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    patience: float = 0.05,
    meet: Callable[[], object] = lambda: None,
    held: Bytes = COLD,
) -> tuple[SizedSample, ...]:
    """Seconds of one variable's update by the bytes that it reads and writes; what starting takes at 0 bytes.

    Args:
        optimizer: the user's; it is not changed.
        device: where the variables lie.
        patience: seconds for each size, at least.
        meet: waits for the ranks that measure side by side.
        held: bytes that a step holds.
    """
    called = getattr(optimizer, "_opt_called", None)
    most = min(_MOST, held // _BYTES)
    rest = torch.zeros(max(held // 4, 1), device=device)

    def took_by(elements: int, count: int) -> tuple[Took, int]:
        variables = Variables(
            {f"v{number}": torch.ones(elements, device=device) for number in range(count)}
        )
        updates = _updates(optimizer, variables)
        sources = [torch.full((elements,), 1e-3, device=device) for _ in range(count)]
        with torch.no_grad():
            updates.run(sources)  # makes the states
            meet()
            works = rest.sum, partial(updates.run, sources)
            (_, own), _ = took_in_turns(works, (0, 1), patience, finish(device))
        return own, _states(variables, elements)

    (one, _), (many, _) = took_by(_ELEMENTS[0], 1), took_by(_ELEMENTS[0], _TOGETHER)
    start = max(0.0, (_TOGETHER * one.seconds - many.seconds) / (_TOGETHER - 1))
    found = [SizedSample(NO_BYTES, Seconds(start), one.spread)]
    for elements in _ELEMENTS:
        count = max(1, min(_TOGETHER, most // elements))
        each, states = took_by(elements, count)
        # Target and states are read and written, the gradient is read.
        moved = Bytes(4 * elements * (3 + 2 * states))
        seconds = max(0.0, each.seconds - start) / count
        found.append(SizedSample(moved, Seconds(seconds), each.spread))
    if called is not None:
        optimizer._opt_called = called  # type: ignore[attr-defined]  # what schedulers look at
    return tuple(found)


def _updates(optimizer: torch.optim.Optimizer, variables: Variables) -> OptimizerUpdates:
    """Updates of variables by the options of an optimizer's first group."""
    rule = type(optimizer).__name__
    every = [LocalUpdate(rule, key, key, (), 0, key) for key in variables]
    return OptimizerUpdates(optimizer, every, variables)


def _states(variables: Variables, elements: int) -> int:
    """The number of states of its size that a variable has."""
    kept = variables.kept.entries["v0"].values()
    return sum(isinstance(one, torch.Tensor) and one.numel() == elements for one in kept)
