"""Seconds of the distinct local calls of programs, each run by itself as a segment would run it.

Operands that are views are made by the same views of a dense tensor, as kernels depend on strides. In a step a call
finds little of what it reads, or of its own code, in the processor's caches, and writes to memory that lay idle: so
calls run in turns, in the order of the program, on one set of operands after the other, as many as a step holds, and
results stay until their set comes again. Ranks that work side by side must measure side by side, since they share the
machine: the same calls in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, final

import torch
from torch import Tensor

from weft.hardware import usual_device
from weft.hardware.call_text import call_text, lying, makers_of
from weft.hardware.measured import Sample
from weft.ir.nodes import OVER_STEP
from weft.ir.plan import LocalCall, LocalProgram, LocalValue
from weft.ir.queries.memory import value_bytes
from weft.ir.queries.op_calls import at_micro_batch, local_op_call
from weft.ops import OpCall, shares_memory
from weft.ops.rule import kept_results
from weft.runtime.kernels.generated import build_kernel
from weft.runtime.measured.stopwatch import Took, took_in_turns
from weft.runtime.random import uniform
from weft.units import Bytes, Seconds

# Values that every op takes: no logarithm of 0, no numbers too small to be quick.
_LOW, _HIGH = 0.5, 1.5
# Bytes of which no cache holds much; a step that holds more is as cold.
COLD = Bytes(2**26)
_MOST_SETS = 256
# Bytes of the operands of calls that run in turns.
_ROOM = Bytes(2**28)
# Acts of a call that keeps a sum from one micro-batch to the next.
_ACTS = 2


@final
class CallOfProgram:
    """A call with the views that its operands are made by."""

    def __init__(
        self, node: LocalCall, makers: Mapping[str, LocalCall], values: Mapping[str, LocalValue]
    ) -> None:
        self.node = node
        self.views = tuple({id(view): view for view in _views(node, makers)}.values())
        self.values = values
        self.lies = lying(node, makers, values)
        self.text = call_text(self.call, self.lies)
        self.looped = node.op in OVER_STEP

    @property
    def bytes(self) -> Bytes:
        """The bytes of its operands and results."""
        names = {*self.node.operands, *(each.name for each in self.node.makes)}
        return Bytes(sum(value_bytes(self.values[name]) for name in names))

    @property
    def call(self) -> OpCall:
        """As the rules see it."""
        return local_op_call(self.node, self.values)


def calls_in_order(programs: Iterable[LocalProgram], most: int = 4) -> list[CallOfProgram]:
    """The calls of programs in their order; of those with the same text the first, at most so many times."""
    found: dict[str, CallOfProgram] = {}
    times: Counter[str] = Counter()
    order = []
    for program in programs:
        makers = makers_of(program.nodes)
        for node in program.nodes:
            if isinstance(node, LocalCall):
                one = CallOfProgram(node, makers, program.values)
                times[one.text] += 1
                if times[one.text] <= most:
                    order.append(found.setdefault(one.text, one))
    return order


def _views(node: LocalCall, makers: Mapping[str, LocalCall]) -> Iterator[LocalCall]:
    """The views that a call's operands are, each behind those that it is a view of.

    So it is with results that only the call understands, such as the workspace of its forward.
    """
    for name in node.operands:
        maker = makers.get(name)
        if maker is not None and (shares_memory(maker.op) or _is_kept(maker, name)):
            yield from _views(maker, makers)
            yield maker


def _is_kept(maker: LocalCall, name: str) -> bool:
    made = [None if value is None else value.name for value in maker.outputs]
    return made.index(name) in kept_results(maker.op)


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
            times is called as often in a round.
        as_run: a call in the op that has its kernel on the device.
        device: where they run.
        patience: seconds for each, on the mean.
        held: bytes that a step holds.
        begun: is told the text of each call.
    """
    found: dict[str, Sample] = {}
    rounds: list[Took] = []
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
) -> tuple[dict[str, Sample], Took]:
    """Seconds of calls that run one after the other, round after round, and of a round."""
    distinct = list(dict.fromkeys(group))
    size = sum(one.bytes for one in distinct)
    sets = max(1, min(_MOST_SETS, held // max(size, 1)))
    with torch.no_grad():
        made = {one: _work(one, as_run(one.node), device, sets) for one in distinct}
        works = {one: work for one, work in made.items() if work is not None}
        order = [one for one in group if one in works]
        (idle, *seen), whole = took_in_turns(
            [_in_turns(_idle, [()], looped=False), *works.values()],
            [0, *(1 + list(works).index(one) for one in order)],
            patience,
            _finish(device),
        )
    usual = usual_device(device.type)
    found = {}
    for one, took in zip(works, seen, strict=True):
        acts = _ACTS if one.looped else 1
        seconds = Seconds(max(took.seconds - idle.seconds, 0.0) / acts)
        found[one.text] = Sample(seconds, took.spread, usual.of_call(0, one.call).seconds)
    return found, whole


def _finish(device: torch.device) -> Callable[[], object]:
    """Waits for a device; the host has done what it does."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing


def _nothing() -> None:
    """A host is done when a call returns."""


def _idle(draw: Any, *inputs: Tensor) -> None:
    """Takes as long as calling a segment that does nothing."""


def _work(
    one: CallOfProgram, runs: LocalCall, device: torch.device, sets: int
) -> Callable[[], object] | None:
    """A call as a function without arguments, each time on the next set of operands; None where it cannot run so.

    Args:
        one: the call.
        runs: the same in the op that has its kernel.
        device: where it runs.
        sets: how many sets of operands there are.
    """
    call = _first_micro(runs)
    made = [each.name for each in call.makes]
    try:
        kernel = build_kernel([call], made, device, micro_batches=_ACTS if one.looped else 1)
        bases = _bases(one, kernel.inputs, device)
        every = [_operands(one, kernel.inputs, bases, device)]
        for _ in range(sets - 1):
            again = [base.clone() for base in bases]
            every.append(_operands(one, kernel.inputs, again, device))
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


def _bases(one: CallOfProgram, names: Sequence[str], device: torch.device) -> list[Tensor]:
    """The tensors that the operands of a call are, or are views of."""
    views = build_kernel(_first_views(one), names, device)
    return [_example(one, name, device) for name in views.inputs]


def _operands(
    one: CallOfProgram, names: Sequence[str], bases: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    return list(build_kernel(_first_views(one), names, device).function(None, *bases))


def _first_views(one: CallOfProgram) -> list[LocalCall]:
    return [_first_micro(each) for each in one.views]


def _first_micro(call: LocalCall) -> LocalCall:
    args, kwargs = at_micro_batch(call.args, 0), at_micro_batch(call.kwargs, 0)
    return (
        call
        if (args, kwargs) == (call.args, call.kwargs)
        else replace(call, args=args, kwargs=kwargs)
    )


def _example(one: CallOfProgram, name: str, device: torch.device) -> Tensor:
    """Numbers of the shape of an operand; integers are valid as indices of anything."""
    value = one.values[name]
    dtype: torch.dtype = getattr(torch, value.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.empty(value.shape, device=device).uniform_(_LOW, _HIGH).to(dtype)
    if dtype == torch.bool:
        return torch.ones(value.shape, dtype=dtype, device=device)
    draws = torch.Generator(device).manual_seed(0)
    return torch.randint(_indices(one), value.shape, generator=draws, device=device).to(dtype)


def _rows(one: CallOfProgram) -> int:
    """The rows of the whole table that a call looks up in, or makes the gradient of; 0 where it does neither.

    The gradient of a shard does not say how many there are; of two shards, half of the indices lie outside.
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
