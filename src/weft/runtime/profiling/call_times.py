"""Seconds of updates, and of the distinct local calls of programs, each run by itself as a segment would run it.

In a step a call finds little of what it reads, or of its own code, in the processor's caches, and writes to memory that
lay idle: so calls run in turns, in the order of the program, on one set of operands after the other, as many as a step
holds, and results stay until their set comes again. Ranks that work side by side must measure side by side, since they
share the machine: the same calls in the same order.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from weft.hardware import default_device
from weft.hardware.durations import call_text, makers_of, view_texts
from weft.hardware.measured_costs import Sample, SizedSample
from weft.ir.nodes import OVER_STEP
from weft.ir.plan import LocalCall, LocalProgram, LocalUpdate, LocalValue
from weft.ops import OpCall, shares_memory
from weft.ops.rule import kept_results
from weft.runtime.executor.optimizer import OptimizerUpdates
from weft.runtime.kernels.generated import build_kernel
from weft.runtime.memory.state import Variables
from weft.runtime.random import uniform
from weft.units import NO_BYTES, Bytes, Seconds

# Rounds that are measured.
FEWEST, _MOST_ROUNDS = 5, 41
# Bytes of which no cache holds much; a step that holds more is as cold.
COLD = Bytes(2**26)
# Nothing takes less than no time: wider, a normal distribution would say so.
_WIDEST = 0.5


@final
class Timing(NamedTuple):
    """Measured seconds.

    Attributes:
        spread: relative standard deviation of a normal distribution with the same quartiles; at most a half.
    """

    seconds: Seconds
    spread: float


def time_in_turns(
    works: Sequence[Callable[[], object]],
    order: Sequence[int],
    patience: float,
    finish: Callable[[], object],
) -> tuple[list[Timing], Timing]:
    """Seconds of several works that run one after the other, again and again, and of a whole round.

    Each finds caches as the others leave them.

    Args:
        order: which of them are called in a round, one after the other; each at least once.
        finish: waits until a device has done what it was given; within the time of each work.
    """
    rounds: list[list[float]] = [[] for _ in works]
    wholes: list[float] = []
    ends = perf_counter() + patience * len(works)
    for number in range(_MOST_ROUNDS):
        if number >= FEWEST and perf_counter() > ends:
            break
        whole = 0.0
        for place in order:
            work = works[place]
            start = perf_counter()
            work()
            finish()
            took = perf_counter() - start
            rounds[place].append(took)
            whole += took
        wholes.append(whole)
    return [summary(own) for own in rounds], summary(wholes)


def finish(device: torch.device) -> Callable[[], object]:
    """Waits for a device; the host has done what it does."""
    # A host is done when a call returns.
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def summary(rounds: list[float]) -> Timing:
    """The median and the spread of some measurements of one thing."""
    middle = statistics.median(rounds)
    low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else (middle,) * 3
    spread = (high - low) / 1.349 / middle if middle else 0.0
    return Timing(Seconds(middle), min(spread, _WIDEST))


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
            [_in_turns(lambda draw: None, [()], looped=False), *works.values()],
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


def _work(
    one: CallOfProgram, runs: LocalCall, device: torch.device, sets: int
) -> Callable[[], object] | None:
    """A call as a function without arguments, each time on the next set of operands; None if it cannot run so."""
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
# For a variable, its gradient and two states, for each element.
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


# Local calls of programs, each with operands to run it by itself.
#
# Operands that are views are made by the same views of a dense tensor, as kernels depend on strides; numbers are such
# as every op takes.


# Values that every op takes: no logarithm of 0, no numbers too small to be quick.
_LOW, _HIGH = 0.5, 1.5


@final
class CallOfProgram:
    """A call with the views that its operands are made by."""

    def __init__(
        self, node: LocalCall, makers: Mapping[str, LocalCall], values: Mapping[str, LocalValue]
    ) -> None:
        self.node = node
        self.views = tuple({id(view): view for view in _views(node, makers)}.values())
        self.values = values
        self.lies = view_texts(node, makers, values)
        self.text = call_text(self.call, self.lies)
        self.looped = node.op in OVER_STEP

    @property
    def bytes(self) -> Bytes:
        """The bytes of its operands and results."""
        names = {*self.node.operands, *(each.name for each in self.node.makes)}
        return Bytes(sum(self.values[name].nbytes for name in names))

    @property
    def call(self) -> OpCall:
        """The call as sharding rules see it."""
        return self.node.first


def calls_in_order(programs: Iterable[LocalProgram]) -> list[CallOfProgram]:
    """The calls of programs in their order; one object for all of the same text, the first."""
    found: dict[str, CallOfProgram] = {}
    order = []
    for program in programs:
        makers = makers_of(program.nodes)
        for node in program.nodes:
            if isinstance(node, LocalCall):
                one = CallOfProgram(node, makers, program.values)
                order.append(found.setdefault(one.text, one))
    return order


def _views(node: LocalCall, makers: Mapping[str, LocalCall]) -> Iterator[LocalCall]:
    """The views that a call's operands are, each after those that it is a view of.

    So it is with results that only the call understands, such as the workspace of its forward.
    """
    for name in node.operands:
        maker = makers.get(name)
        if maker is None:
            continue
        made = [None if value is None else value.name for value in maker.outputs]
        if shares_memory(maker.op) or made.index(name) in kept_results(maker.op):
            yield from _views(maker, makers)
            yield maker


def bases_of(one: CallOfProgram, names: Sequence[str], device: torch.device) -> list[Tensor]:
    """The tensors that the operands of a call are, or are views of."""
    views = build_kernel(_first_views(one), names, device)
    return [_example(one, name, device) for name in views.inputs]


def operands_on(
    one: CallOfProgram, names: Sequence[str], bases: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """The operands of a call, as views of `bases` where they are views."""
    return list(build_kernel(_first_views(one), names, device).function(None, *bases))


def _first_views(one: CallOfProgram) -> list[LocalCall]:
    return [first_micro(each) for each in one.views]


def first_micro(call: LocalCall) -> LocalCall:
    """The call as the first micro-batch runs it."""
    return replace(call, call=call.first)


def _example(one: CallOfProgram, name: str, device: torch.device) -> Tensor:
    value = one.values[name]
    dtype: torch.dtype = getattr(torch, value.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.empty(value.shape, device=device).uniform_(_LOW, _HIGH).to(dtype)
    if dtype == torch.bool:
        return torch.ones(value.shape, dtype=dtype, device=device)
    draws = torch.Generator(device).manual_seed(0)
    return torch.randint(_indices(one), value.shape, generator=draws, device=device).to(dtype)


def _rows(one: CallOfProgram) -> int:
    """The rows of the whole table that a call looks up in, or makes the gradient of; 0 if it does neither.

    The gradient of a shard does not say how many there are; of two shards, half of the indices are outside.
    """
    node = one.node
    match node.op, node.args:
        case ("aten.embedding.default", _):
            return one.values[node.operands[0]].shape[0]
        case ("weft.embedding_shard", (_, _, int(offset), *whole)):
            own = one.values[node.operands[0]].shape[0]
            return next((each for each in whole if isinstance(each, int)), offset + own)
        case ("aten.embedding_dense_backward.default", (_, _, int(rows), *_)):
            return rows
        case ("weft.embedding_dense_backward_shard", (_, _, int(rows), int(offset), *_)):
            return max(offset + rows, 2 * rows)
    return 0


def _indices(one: CallOfProgram) -> int:
    """A number below which an integer is an index: of a table's rows, else of all dimensions of tensors of numbers."""
    rows = _rows(one)
    if rows:
        return rows
    every = (*one.views, one.node)
    names = {name for each in every for name in (*each.operands, *(v.name for v in each.makes))}
    floats = (one.values[name] for name in names if "float" in one.values[name].dtype)
    sizes = [size for value in floats for size in value.shape]
    numbers = [arg for arg in one.node.args if isinstance(arg, int) and not isinstance(arg, bool)]
    return max(1, min([*sizes, *(each for each in numbers if each > 1)], default=1))
