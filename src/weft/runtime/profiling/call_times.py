"""Seconds of updates, and of the distinct local calls of programs, each run by itself as a segment would run it.

In a step a call finds little of what it reads, or of its own code, in the processor's caches, and writes to memory that
lay idle: so calls run in turns, in the order of the program, on one set of operands after the other, as many as a step
holds, and results stay until their set comes again. Ranks that work side by side must measure side by side, since they
share the machine: the same calls in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from weft.hardware import default_device
from weft.hardware.measured_costs import Sample, SizedSample
from weft.ir.plan import LocalCall, LocalUpdate
from weft.runtime.executor.optimizer import OptimizerUpdates
from weft.runtime.kernels.generated import build_kernel
from weft.runtime.memory.state import Variables
from weft.runtime.profiling.call_operands import CallOfProgram, bases_of, first_micro, operands_on
from weft.runtime.profiling.stopwatch import COLD, FEWEST, Timing, finish, time_in_turns
from weft.runtime.random import uniform
from weft.units import NO_BYTES, Bytes, Seconds

_MOST_SETS = 256
# Bytes of the operands of calls that run in turns.
_ROOM = Bytes(2**28)
# Acts of a call that keeps a sum from one micro-batch to the next.
_ACTS = 2
# Calls between two that do nothing.
_IDLE_EACH = 4
# Seconds of any call, at least.
_SHORTEST = Seconds(3e-6)


def measured_calls(
    calls: Iterable[CallOfProgram],
    as_run: Callable[[LocalCall], LocalCall],
    device: torch.device,
    patience: float = 0.03,
    held: Bytes = COLD,
    begun: Callable[[str], object] = lambda _: None,
) -> tuple[dict[str, Sample], float]:
    """Seconds of calls by their texts, and the relative standard deviation that they have in common.

    Calls that cannot be run by themselves are left out.

    Args:
        calls: in the order of programs, the same on all ranks that measure side by side. One that is there several
            times is called as often in a round, where that does not take too long.
        as_run: a call in the op that has its kernel on the device.
    """
    found: dict[str, Sample] = {}
    rounds: list[Timing] = []
    for group in _groups(calls):
        left = [one for one in group if one.text not in found]
        for each in dict.fromkeys(left):
            begun(each.text)
        seen, whole = _of_group(left, as_run, device, patience, held)
        found |= seen
        rounds.append(whole)
    seconds = sum(each.seconds for each in rounds)
    return found, sum(each.seconds * each.spread for each in rounds) / seconds if seconds else 0.0


def _groups(calls: Iterable[CallOfProgram]) -> Iterator[list[CallOfProgram]]:
    """Calls that follow each other, as many as have room at the same time."""
    group: list[CallOfProgram] = []
    sizes: dict[CallOfProgram, Bytes] = {}
    for each in calls:
        sizes.setdefault(each, each.bytes)
        if group and sum(sizes.values()) > _ROOM:
            yield group
            group, sizes = [], {each: each.bytes}
        group.append(each)
    if group:
        yield group


def _of_group(
    group: Sequence[CallOfProgram],
    as_run: Callable[[LocalCall], LocalCall],
    device: torch.device,
    patience: float,
    held: Bytes,
) -> tuple[dict[str, Sample], Timing]:
    """Seconds of calls that run one after the other, round after round, and of a round."""
    distinct = list(dict.fromkeys(group))
    size = sum(one.bytes for one in distinct)
    sets = max(1, min(_MOST_SETS, held // max(size, 1)))
    with torch.no_grad():
        made = {one: _work(one, as_run(one.node), device, sets) for one in distinct}
        works = {one: work for one, work in made.items() if work is not None}
        place = {one: number for number, one in enumerate(works, 1)}
        (idle, *seen), whole = time_in_turns(
            [_in_turns(_idle, [()], looped=False), *works.values()],
            _with_idle([place[one] for one in _round(group, device, patience) if one in place]),
            patience,
            finish(device),
        )
    usual = default_device(device.type)
    found = {}
    for one, took in zip(works, seen, strict=True):
        acts = _ACTS if one.looped else 1
        seconds = Seconds(max(took.seconds - idle.seconds, 0.0) / acts)
        found[one.text] = Sample(seconds, took.spread, usual.of_call(0, one.call).seconds)
    return found, whole


def _round(
    group: Sequence[CallOfProgram], device: torch.device, patience: float
) -> list[CallOfProgram]:
    """The calls of a round: as often as programs have them, or the first of each, where a round would take too long."""
    times = Counter(group)
    usual = default_device(device.type)
    seconds = {one: max(usual.of_call(0, one.call).seconds, _SHORTEST) for one in times}
    most = max(times.values(), default=1)
    while most > 1 and (
        sum(seconds[one] * min(count, most) for one, count in times.items())
        > patience * len(times) / FEWEST
    ):
        most = most // 2
    so_far: Counter[CallOfProgram] = Counter()
    found = []
    for one in group:
        so_far[one] += 1
        if so_far[one] <= most:
            found.append(one)
    return found


def _with_idle(places: Sequence[int]) -> list[int]:
    """An idle call among every few others, so that it finds caches as they do."""
    found = [0]
    for number, place in enumerate(places, 1):
        found += [place] if number % _IDLE_EACH else [place, 0]
    return found


def _idle(draw: Any, *inputs: Tensor) -> None:
    """Takes as long as calling a segment that does nothing."""


def _work(
    one: CallOfProgram, runs: LocalCall, device: torch.device, sets: int
) -> Callable[[], object] | None:
    """A call as a function without arguments, each time on the next set of operands; None where it cannot run so."""
    call = first_micro(runs)
    made = [each.name for each in call.makes]
    try:
        kernel = build_kernel([call], made, device, micro_batches=_ACTS if one.looped else 1)
        bases = bases_of(one, kernel.inputs, device)
        every = [operands_on(one, kernel.inputs, bases, device)]
        for _ in range(sets - 1):
            again = [base.clone() for base in bases]
            every.append(operands_on(one, kernel.inputs, again, device))
        work = _in_turns(kernel.function, every, one.looped)
        work()  # what the first call costs by itself does not count
    except Exception:  # whatever an op refuses of plain numbers, it is not measured
        return None
    return work


def _in_turns(
    function: Callable[..., Any], sets: Sequence[Sequence[Tensor]], looped: bool
) -> Callable[[], object]:
    draw = partial(uniform, 0, 0)
    results: list[Any] = [None] * len(sets)
    turns = cycle(range(len(sets)))

    def work() -> None:
        turn = next(turns)
        results[turn] = None
        if looped:
            function(draw, 0, *sets[turn])
            results[turn] = function(draw, 1, *sets[turn])
        else:
            results[turn] = function(draw, *sets[turn])

    return work


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
    """Seconds of one variable's update by the bytes that it reads and writes; what starting takes at 0 bytes."""
    called = getattr(optimizer, "_opt_called", None)
    most = min(_MOST, held // _BYTES)
    rest = torch.zeros(max(held // 4, 1), device=device)

    def took_by(elements: int, count: int) -> tuple[Timing, int]:
        variables = Variables(
            {f"v{number}": torch.ones(elements, device=device) for number in range(count)}
        )
        every = [LocalUpdate(type(optimizer).__name__, key, key, (), 0, key) for key in variables]
        updates = OptimizerUpdates(optimizer, every, variables)
        sources = [torch.full((elements,), 1e-3, device=device) for _ in range(count)]
        with torch.no_grad():
            updates.run(sources)  # makes the states
            meet()
            works = rest.sum, partial(updates.run, sources)
            (_, own), _ = time_in_turns(works, (0, 1), patience, finish(device))
        kept = variables.kept.entries["v0"].values()
        return own, sum(isinstance(x, torch.Tensor) and x.numel() == elements for x in kept)

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
