"""Local calls of programs, each with operands to run it by itself.

Operands that are views are made by the same views of a dense tensor, as kernels depend on strides; numbers are such as
every op takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.hardware.durations import call_text, lying, makers_of
from weft.ir.nodes import OVER_STEP
from weft.ir.plan import LocalCall, LocalProgram, LocalValue
from weft.ops import OpCall, shares_memory
from weft.ops.rule import kept_results
from weft.runtime.kernels.generated import build_kernel
from weft.units import Bytes

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
        self.lies = lying(node, makers, values)
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
    """The views that a call's operands are, each behind those that it is a view of.

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
