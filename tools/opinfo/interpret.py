"""All ranks of a placement in one thread: every node of their local programs, collectives across them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.errors import InternalError
from weft.ir.logical import Arg, Ref
from weft.ir.plan import Collective, Communicator, LocalCall, LocalProgram, Transfer
from weft.ops.call import Token
from weft.ops.cost import dtype_name
from weft.runtime.channels.channel import reduce_in_order
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.runtime.random import uniform
from weft.runtime.torch_ops import torch_op, torch_value

Values = dict[str, Tensor]
UNIFORM = "weft.uniform"


def run_programs(
    programs: Sequence[LocalProgram],
    groups: Sequence[Communicator],
    inputs: Sequence[Mapping[str, Tensor]],
) -> list[Values]:
    """Run the programs of all ranks, in the order of ranks, on their local inputs by key.

    Returns:
        Every value of each rank by its name in the program.
    """
    held: list[Values] = [
        {given.value.name: by_key[given.key] for given in program.inputs}
        for program, by_key in zip(programs, inputs, strict=True)
    ]
    at = {program.rank: index for index, program in enumerate(programs)}
    members = {group.id: [at[rank] for rank in group.ranks] for group in groups}
    for nodes in zip(*(program.nodes for program in programs), strict=True):
        if isinstance(nodes[0], Collective):
            _run_collectives(nodes, members, held)
        elif isinstance(nodes[0], Transfer):
            _run_transfers(nodes, members, held)
        else:
            for node, values in zip(nodes, held, strict=True):
                _run_call(node, values)
    return held


def _run_call(node: Any, values: Values) -> None:
    assert isinstance(node, LocalCall)  # nothing is updated here
    args = [_value(arg, values) for arg in node.args]
    kwargs = {name: _value(arg, values) for name, arg in node.kwargs}
    found = _function(node.op)(*args, **kwargs)
    results = found if isinstance(found, (tuple, list)) else (found,)
    for made, tensor in zip(node.outputs, results, strict=True):
        if made is not None:
            _check(node.op, made, tensor)
            values[made.name] = tensor


def _function(op: str) -> Callable[..., Any]:
    if op == UNIFORM:
        return partial(uniform, 0, 0)
    return LOCAL_OPS[op] if op in LOCAL_OPS else torch_op(op)


def _value(arg: Arg, values: Values) -> Any:
    match arg:
        case Ref(name=name):
            return values[name]
        case Token():
            return torch_value(arg)
        case tuple():
            return [_value(part, values) for part in arg]
    return arg


def _run_collectives(
    nodes: Sequence[Any], members: Mapping[int, list[int]], held: list[Values]
) -> None:
    done: set[int] = set()
    for node in nodes:
        if node.communicator in done:
            continue
        done.add(node.communicator)
        ranks = members[node.communicator]
        parts = [held[rank][nodes[rank].input.name] for rank in ranks]
        mine = [nodes[rank] for rank in ranks]
        for rank, one, made in zip(ranks, mine, _exchange(mine, parts), strict=True):
            _check(one.kind, one.output, made)
            held[rank][one.output.name] = made


def _exchange(nodes: list[Collective], parts: list[Tensor]) -> list[Tensor]:
    """What each rank of a group gets from a collective."""
    first = nodes[0]
    match first.kind:
        case "all_reduce":
            return [reduce_in_order(parts, first.reduction)] * len(parts)
        case "all_gather":
            return [torch.cat(parts, first.dim)] * len(parts)
        case "reduce_scatter":
            total = reduce_in_order(parts, first.reduction)
            return list(total.split_with_sizes(list(first.sizes), first.dim))
    pieces = [
        part.split_with_sizes(list(node.split_sizes), node.split_dim)
        for node, part in zip(nodes, parts, strict=True)
    ]
    return [torch.cat([own[i] for own in pieces], node.dim) for i, node in enumerate(nodes)]


def _run_transfers(
    nodes: Sequence[Any], members: Mapping[int, list[int]], held: list[Values]
) -> None:
    """Pieces of the inputs go to their places in the outputs; all ranks are in both placements here."""
    for rank, node in enumerate(nodes):
        made = node.output
        output = torch.empty(made.shape, dtype=getattr(torch, made.dtype))
        ranks = members[node.communicator]
        for peer, region in node.receives:
            source = nodes[ranks[peer]]
            sent = dict(source.sends)[ranks.index(rank)]
            part = _region(held[ranks[peer]][source.input.name], sent)
            _region(output, region).copy_(part)
        held[rank][made.name] = output


def _region(tensor: Tensor, region: Any) -> Tensor:
    for dim, (offset, length) in enumerate(region):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _check(what: str, made: Any, tensor: Tensor) -> None:
    if tuple(tensor.shape) != made.shape or dtype_name(tensor.dtype) != made.dtype:
        raise InternalError(
            f"{what} makes {dtype_name(tensor.dtype)}{list(tensor.shape)} where the program says "
            f"{made.dtype}{list(made.shape)}"
        )
