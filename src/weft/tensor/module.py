"""Modules with global parameters, plain copies of global tensors, and DTensors as global tensors and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from weft.errors import LayoutError, UserError, wrong
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.patterns import check_named, first_match
from weft.tensor.create import tensor
from weft.tensor.dispatch.interleaved import check_order
from weft.tensor.divergence import note_made
from weft.tensor.global_tensor import GlobalTensor, keep_gradient_with
from weft.tensor.spec import checked_placement, intern, mesh_of

Module = TypeVar("Module", bound=nn.Module)


def distribute(
    module: Module,
    placement: Placement,
    layouts: Mapping[str, SBP | Sequence[SBP]] | None = None,
) -> Module:
    """Make the parameters and buffers of a module global, in place.

    Gradients of parameters are brought to the layout of their parameter as soon as they are
    complete.

    Args:
        module: on each process with the same shapes; the values of the placement's first rank
            count.
        placement: where the parameters lie.
        layouts: patterns of names (docs/patterns.md) and the SBP of what they match; the first that
            matches counts. Tensors that no pattern matches, and scalars, are Broadcast.

    Returns:
        `module` itself.

    Raises:
        UserError: when it is not a module.
        StrategyError: when a pattern matches nothing.
        LayoutError: when a layout does not fit a tensor.
    """
    if not isinstance(module, nn.Module):
        raise UserError(
            f"weft.distribute takes a module, got an object of type {type(module).__name__}; "
            "weft.tensor(x, placement=…, sbp=…) makes a tensor global, weft.from_local the parts of one"
        )
    checked_placement(placement, "weft.distribute")
    patterns = {} if layouts is None else layouts
    if not isinstance(patterns, Mapping) or not all(isinstance(each, str) for each in patterns):
        raise wrong("weft.distribute: layouts=", "a mapping from name patterns to SBPs", layouts)
    named = [*module.named_parameters(), *module.named_buffers()]
    names = [name for name, _ in named]
    for pattern in patterns:
        check_named(f"distribute: {pattern!r}", pattern, names, "parameters and buffers")
    made = {}
    for name, value in named:
        chosen = first_match(patterns, name) if value.dim() else None
        sbp = Broadcast() if chosen is None else patterns[chosen]
        made[id(value)] = _global(name, value, placement, sbp)
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            own.update({name: made[id(x)] for name, x in own.items() if x is not None})
    return module


def _global(name: str, value: Tensor, placement: Placement, sbp: Any) -> Any:
    if isinstance(value, GlobalTensor):
        raise LayoutError(
            f"distribute: {name} is a global tensor already; use its to_global(…) for another layout"
        )
    try:
        made = tensor(value, placement=placement, sbp=sbp)
    except LayoutError as error:
        raise LayoutError(f"distribute: {name}: {error}") from None
    if not isinstance(value, nn.Parameter):
        return made
    parameter = nn.Parameter(made, value.requires_grad)
    if value.requires_grad:
        keep_gradient_with(parameter)
    return parameter


def whole(value: Any) -> Any:
    """A copy with a whole plain tensor in place of each global tensor; every process must call it.

    So code that knows nothing of weft takes what a live model holds, on any number of ranks.

    Args:
        value: a tensor, dicts, lists and tuples of such, or a module, of which it is a copy, without gradients. Other
            objects stay as they are.
    """
    if not isinstance(value, nn.Module):
        return pytree.tree_map_only(GlobalTensor, GlobalTensor.full, value)
    copies: dict[int, Any] = {}
    for held in (*value.parameters(), *value.buffers()):
        if isinstance(held, GlobalTensor):
            plain = held.detach().full()  # type: ignore[attr-defined]
            is_parameter = isinstance(held, nn.Parameter)
            copies[id(held)] = nn.Parameter(plain, held.requires_grad) if is_parameter else plain
    return copy.deepcopy(value, copies)


@cache
def _dtensor() -> Any:
    """`torch.distributed.tensor`, which takes half a second to import: only whoever needs it pays."""
    return import_module("torch.distributed.tensor")


def from_dtensor(x: Any) -> GlobalTensor:
    """The DTensor as a global tensor on the same memory, without gradients.

    Raises:
        LayoutError: for placements that have no SBP, and shards that are not balanced.
    """
    if not isinstance(x, _dtensor().DTensor):
        raise wrong("weft.from_dtensor: x", "a DTensor", x)
    grid = x.device_mesh.mesh
    placement = Placement(
        x.device_mesh.device_type, tuple(grid.shape), tuple(grid.flatten().tolist())
    )
    layout = Layout(placement, tuple(_sbp_of(one) for one in x.placements))
    mesh = mesh_of(placement)
    local = x.to_local().detach()
    shape, found = tuple(x.shape), tuple(local.shape)
    for rank in mesh.ranks:
        expected = layout.local_shape(shape, rank)
        if found != expected:
            raise LayoutError(
                f"from_dtensor: rank {rank} holds {list(found)} of {list(shape)} as {layout}; balanced shards hold "
                f"{list(expected)}. Redistribute to Replicate, or split a dimension that divides evenly"
            )
    spec = intern(mesh, layout, x.shape, x.stride(), x.dtype)
    note_made(mesh, "weft.from_dtensor", str(spec))
    return GlobalTensor(spec, (local,) * len(mesh.ranks))


def to_dtensor(x: GlobalTensor, device_mesh: DeviceMesh | None = None) -> Any:
    """The same tensor as a DTensor, on the same memory, without gradients.

    Args:
        x: a global tensor; this process has one rank of its placement.
        device_mesh: with the ranks of the placement; by default a new one, which all processes of
            the job must make together.

    Raises:
        UserError: in a local world of several ranks, or when the mesh has other ranks; for a tensor that is stored
            in shares.
        LayoutError: for what DTensor would cut otherwise.
    """
    if not isinstance(x, GlobalTensor):
        raise wrong("weft.to_dtensor: x", "a global tensor", x)
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise wrong("weft.to_dtensor: device_mesh=", "a DeviceMesh", device_mesh)
    placement, spec = x.placement, x.spec
    check_order(x, "to_dtensor")
    if len(spec.mesh.ranks) != 1:
        raise UserError(
            f"to_dtensor: this process has the ranks {list(spec.mesh.ranks)}; expected one: start a process for each "
            "rank with weft run -n"
        )
    grid = torch.tensor(placement.ranks).view(placement.shape)
    mesh = device_mesh or DeviceMesh(placement.device_type, grid)
    if not torch.equal(mesh.mesh.cpu(), grid):
        raise UserError(
            f"to_dtensor: the mesh {mesh} has other ranks than {placement}; give a DeviceMesh of these, or none"
        )
    for rank in placement.ranks:
        _check_chunks(spec.shape, spec.layout, rank)
    return _dtensor().DTensor.from_local(
        x.locals[0],
        mesh,
        [_placement(sbp) for sbp in spec.layout.sbp],
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=spec.strides,
    )


def _sbp_of(placement: Any) -> SBP:
    known = _dtensor()
    if type(placement) is known.Replicate:
        return Broadcast()
    if type(placement) is known.Shard:  # a strided shard is another class
        return Split(placement.dim)
    if type(placement) is known.Partial and placement.reduce_op in _SHARED:
        return Partial(placement.reduce_op)
    raise LayoutError(
        f"from_dtensor: the placement {placement} has no SBP; redistribute to Shard, Replicate or Partial of "
        f"{', '.join(_SHARED)}"
    )


def _placement(sbp: SBP) -> Any:
    known = _dtensor()
    match sbp:
        case Broadcast():
            return known.Replicate()
        case Split(dim):
            return known.Shard(dim)
        case Partial(reduction) if reduction in _SHARED:
            return known.Partial(reduction)
    raise LayoutError(f"to_dtensor: DTensor has no placement for {sbp}; box the tensor first")


# Reductions that both know.
_SHARED = ("sum", "max", "min")


def _check_chunks(shape: tuple[int, ...], layout: Layout, rank: int) -> None:
    """DTensor cuts as `torch.chunk` does, which differs where a dimension does not divide evenly."""
    chunks = list(shape)
    place = layout.placement.coordinates[rank]
    for sbp, parts, index in zip(layout.sbp, layout.placement.shape, place, strict=True):
        if isinstance(sbp, Split):
            size = chunks[sbp.dim]
            most = -(-size // parts)
            chunks[sbp.dim] = max(0, min(most, size - most * index))
    if tuple(chunks) != layout.local_shape(shape, rank):
        raise LayoutError(
            f"to_dtensor: DTensor would give rank {rank} {chunks} of {list(shape)}, not "
            f"{list(layout.local_shape(shape, rank))}; box to weft.broadcast, or split a dimension that divides evenly"
        )
