"""Chains of boxing steps on the local tensors of this process's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from weft.boxing import BoxingStep, steps, transfer_ranks
from weft.boxing.box_steps import step_groups, step_node
from weft.ir.plan import Collective, LocalCall, LocalNode, Transfer
from weft.layout import Layout
from weft.runtime.channels.channel import Channel, reduce_in_order
from weft.runtime.channels.collectives import part_of
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.runtime.world.boxing import box_groups, run_steps
from weft.tensor.divergence import meet
from weft.tensor.mesh import Mesh, open_channels
from weft.tensor.spec import Spec
from weft.units import ITEM_SIZE, Bytes

Locals = tuple[Tensor, ...]


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """Steps that take a tensor's local tensors from one layout to another.

    Attributes:
        steps: from one to the other.
        nodes: for each step, what each rank of this process does; where it holds all ranks.
    """

    spec: Spec
    mesh: Mesh
    target: Layout
    steps: tuple[BoxingStep, ...]
    nodes: tuple[tuple[LocalNode | None, ...], ...]

    @property
    def bytes(self) -> Bytes:
        """Bytes that the steps move over all ranks."""
        return Bytes(sum(step.bytes for step in self.steps))

    def __str__(self) -> str:
        return f"{self.spec} to {self.target}"

    def run(self, locals_: Locals, what: str) -> Locals:
        """The local tensors in the target layout, sharing no memory with those given; `what` asks for them."""
        if not self.steps:
            return locals_
        if not self.spec.mesh.in_process or not self.mesh.in_process:
            return self._with_peers(locals_, what)
        before = locals_
        for step, nodes in zip(self.steps, self.nodes, strict=True):
            locals_ = _among_own(step, nodes, locals_, self.mesh)
        return tuple(map(_unshared, locals_, before))

    def _with_peers(self, locals_: Locals, what: str) -> Locals:
        world, spec = self.mesh.world, self.spec
        open_channels(world, box_groups(spec.layout, self.target, spec.shape, spec.dtype))

        def channel_of(group: tuple[int, ...]) -> Channel:
            return meet(world, group, f"{what}: {self}")

        tensor = locals_[0] if locals_ else None
        (rank,) = world.ranks
        if not {rank} & {*spec.layout.placement.ranks, *self.target.placement.ranks}:
            return ()
        made = run_steps(tensor, spec.layout, self.target, spec.shape, spec.dtype, rank, channel_of)
        if made is None:
            return ()
        return (made if tensor is None else _unshared(made, tensor),)


def chain_between(spec: Spec, target: Layout, mesh: Mesh | None = None) -> Chain | None:
    """The cheapest chain to another layout; None when nothing is to be done.

    Args:
        mesh: that of the target, where its placement is another one.

    Raises:
        LayoutError: when the layout does not fit the tensor.
    """
    if spec.layout == target:
        return None
    dtype = spec.tensor.dtype
    found = steps(spec.layout, target, spec.shape, ITEM_SIZE[dtype])
    nodes = tuple(
        tuple(step_node(step, "x", "y", spec.shape, dtype, rank, lambda _: 0) for rank in ranks)
        for step, ranks in ((step, spec.mesh.ranks) for step in found)
        if step.kind != "transfer" or spec.layout.placement == target.placement
    )
    return Chain(spec, mesh or spec.mesh, target, found, nodes)


def _unshared(made: Tensor, given: Tensor) -> Tensor:
    """A copy where boxing left the tensor, or a view of it: writing one must not write the other."""
    shared = made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return made.clone() if shared else made


def _among_own(
    step: BoxingStep, nodes: Sequence[LocalNode | None], locals_: Locals, mesh: Mesh
) -> Locals:
    """One step of which this process holds all ranks."""
    if isinstance(nodes[0], Transfer):
        return transfer_among_own(lambda _: transfer_ranks(step), nodes, locals_, mesh)
    if not isinstance(nodes[0], Collective):
        return tuple(map(_without_peers, nodes, locals_))
    at = dict(zip(mesh.ranks, range(len(mesh.ranks)), strict=True))
    made: dict[int, Tensor] = {}
    for group in step_groups(step):
        node = nodes[at[group[0]]]
        assert isinstance(node, Collective)
        results = _IN_PROCESS[node.kind](node, [locals_[at[rank]] for rank in group])
        for rank, result in zip(group, results, strict=True):
            made[rank] = result.to(mesh.device_of(rank))
    return tuple(made[rank] for rank in mesh.ranks)


def transfer_among_own(
    group_of: Callable[[int], Sequence[int]],
    nodes: Sequence[LocalNode | None],
    locals_: Locals,
    mesh: Mesh,
) -> Locals:
    """A transfer within one placement of which this process holds all ranks; `group_of` those that talk with one."""
    held = {rank: (node, x) for rank, node, x in zip(mesh.ranks, nodes, locals_, strict=True)}
    made = []
    for rank in mesh.ranks:
        node, tensor = held[rank]
        ranks = group_of(rank)
        assert isinstance(node, Transfer)
        assert node.output is not None
        output = tensor.new_empty(node.output.shape)
        for peer, region in node.receives:
            sender, sent = held[ranks[peer]]
            assert isinstance(sender, Transfer)
            piece = part_of(sent, dict(sender.sends)[ranks.index(rank)])
            part_of(output, region).copy_(piece)
        made.append(output)
    return tuple(made)


def _without_peers(node: LocalNode | None, tensor: Tensor) -> Tensor:
    if not isinstance(node, LocalCall):
        return tensor
    arguments: Any = node.args[1:]
    made: Tensor = LOCAL_OPS[node.op](tensor, *arguments)
    return made


def _copies(tensor: Tensor, count: int) -> list[Tensor]:
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def _together(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(tensors[0].device) for tensor in tensors]


def _all_reduce(step: Collective, tensors: Sequence[Tensor]) -> list[Tensor]:
    return _copies(reduce_in_order(_together(tensors), step.reduction), len(tensors))


def _all_gather(step: Collective, tensors: Sequence[Tensor]) -> list[Tensor]:
    return _copies(torch.cat(_together(tensors), step.dim), len(tensors))


def _reduce_scatter(step: Collective, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = [tensor.split_with_sizes(step.sizes, step.dim) for tensor in _together(tensors)]
    return [reduce_in_order(part, step.reduction) for part in zip(*pieces, strict=True)]


def _all_to_all(step: Collective, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = [t.split_with_sizes(step.split_sizes, step.split_dim) for t in _together(tensors)]
    return [torch.cat(part, step.dim) for part in zip(*pieces, strict=True)]


_IN_PROCESS: dict[str, Callable[[Collective, Sequence[Tensor]], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
