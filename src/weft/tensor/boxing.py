"""Boxing of global tensors between any two layouts, across placements too; from whole tensors to parts, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from weft.boxing import BoxingStep, steps
from weft.boxing.box_steps import step_groups, step_node
from weft.errors import InternalError, LayoutError
from weft.ir.plan import Collective, LocalCall, LocalNode, Transfer
from weft.layout import SBP, Broadcast, Layout, Split
from weft.runtime.channels.channel import Channel, reduce_in_order
from weft.runtime.channels.collectives import part_of, run_collectives, run_transfer
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.runtime.memory.state import local_part
from weft.tensor.divergence import meet, user_line
from weft.tensor.spec import Mesh, Spec, contiguous, open_channels, without_partials
from weft.units import ITEM_SIZE, Bytes


def cut(whole: Tensor, layout: Layout, mesh: Mesh) -> tuple[Spec, Locals]:
    """The parts of a whole tensor that this process's ranks hold, as copies."""
    plain = without_partials(layout)
    spec = contiguous(mesh, plain, tuple(whole.shape), whole.dtype)
    parts = tuple(
        local_part(whole, plain, rank).to(mesh.device_of(rank), copy=True) for rank in mesh.ranks
    )
    return in_layout(spec, tuple(part.contiguous() for part in parts), layout)


def in_layout(spec: Spec, locals_: Locals, layout: Layout) -> tuple[Spec, Locals]:
    """Fresh local tensors brought from a layout without Partial to one that may have it; nothing is sent."""
    way = spec.layout, layout, spec.shape, spec.dtype
    channels: dict[tuple[int, ...], Channel] = {}
    parts = [
        run_steps(part, *way, rank, channels.__getitem__)
        for part, rank in zip(locals_, spec.mesh.ranks, strict=True)
    ]
    return spec.with_layout(layout), tuple(part for part in parts if part is not None)


def assemble(spec: Spec, parts: Mapping[int, Tensor]) -> Tensor:
    """The whole tensor, given the parts of all ranks of its placement."""
    placement = spec.layout.placement
    rows = [parts[rank] for rank in placement.ranks]
    for sbp, size in zip(reversed(spec.layout.sbp), reversed(placement.shape), strict=True):
        rows = [_join(sbp, rows[i : i + size]) for i in range(0, len(rows), size)]
    return rows[0]


def _join(sbp: SBP, parts: Sequence[Tensor]) -> Tensor:
    match sbp:
        case Broadcast():
            return parts[0]
        case Split(dim):
            return torch.cat([part.to(parts[0].device) for part in parts], dim)
        case _:
            return reduce_in_order([part.to(parts[0].device) for part in parts], sbp.reduction)


def from_first(whole: Tensor, mesh: Mesh) -> Tensor:
    """The tensor of the placement's first rank, on all its ranks."""
    if mesh.in_process or not mesh.ranks:
        return whole
    (rank,) = mesh.ranks
    whole = whole.to(mesh.device_of(rank))
    for axis, parts in enumerate(mesh.placement.shape):
        if parts > 1:
            group = mesh.placement.group(rank, axis)
            channel = meet(mesh.world, group, f"weft.tensor of {whole.dtype} {list(whole.shape)}")
            whole = channel.broadcast(whole, 0)
    return whole


def box(
    spec: Spec, locals_: Locals, target: Layout, mesh: Mesh, implicit: str = ""
) -> tuple[Spec, Locals]:
    """The same tensor in the layout `target`; `mesh` is that of its placement.

    Args:
        implicit: the op that needs the boxing implicitly, for strict mode.

    Raises:
        LayoutError: when the layout does not fit; in strict mode when something implicit moves
            bytes.
    """
    target.check(spec.shape)
    chain = chain_between(spec, target, mesh)
    if chain is None:
        return spec.with_layout(target, mesh), locals_
    if implicit:
        check_strict(chain.bytes, implicit, str(chain))
    return spec.with_layout(target, mesh), chain.run(locals_, implicit or "to_global")


_strict: ContextVar[bool] = ContextVar("weft_strict_boxing", default=False)


@contextmanager
def strict_boxing() -> Iterator[None]:
    """Context manager: an op on global tensors whose operands need communication raises LayoutError.

    `to_global` and `full` still communicate.
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def check_strict(moved: int, op: str, advice: str) -> None:
    """Raise LayoutError when boxing moves bytes in strict mode."""
    if moved and _strict.get():
        raise LayoutError(
            f"{user_line()}: {op} would move {moved} bytes to bring operands together, which strict_boxing forbids: "
            f"{advice}. Box them first: x.to_global(sbp=…)"
        )


Locals = tuple[Tensor, ...]


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """Steps that take a tensor's local tensors from one layout to another; a process with all ranks needs none."""

    spec: Spec
    mesh: Mesh
    target: Layout
    steps: tuple[BoxingStep, ...]

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
        whole = assemble(self.spec, dict(zip(self.spec.mesh.ranks, locals_, strict=True)))
        return cut(whole, self.target, self.mesh)[1]

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
    """The cheapest chain to another layout; None when nothing is to be done."""
    if spec.layout == target:
        return None
    found = steps(spec.layout, target, spec.shape, ITEM_SIZE[spec.tensor.dtype])
    return Chain(spec, mesh or spec.mesh, target, found)


def _unshared(made: Tensor, given: Tensor) -> Tensor:
    """A copy where boxing left the tensor, or a view of it: writing one must not write the other."""
    shared = made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return made.clone() if shared else made


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


def _local(node: LocalNode | None, tensor: Tensor) -> Tensor:
    if not isinstance(node, LocalCall):
        return tensor
    arguments: Any = node.args[1:]
    made: Tensor = LOCAL_OPS[node.op](tensor, *arguments)
    return made


# From the ranks of a group, in its order, to this rank's end of a channel between exactly these.
ChannelOf = Callable[[tuple[int, ...]], Channel]


def run_steps(
    tensor: Tensor | None,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rank: int,
    channel_of: ChannelOf,
) -> Tensor | None:
    """Take this rank's part of a tensor from one layout to another.

    Every rank of both placements must call this with the same arguments, but for `tensor` and `rank`. The caller must
    handle gradients (see `weft.boxing.box_steps`): call it while autograd does not record.

    Args:
        tensor: this rank's local tensor; None on a rank that is not in the source's placement.
        channel_of: gives the channel of a group; `box_groups` lists the groups beforehand.

    Returns:
        The new local tensor, which may be `tensor` itself or share its memory; None on a rank that
        is not in the target's placement.

    Raises:
        LayoutError: when a layout does not fit the shape or the dtype.
    """
    for node, group in _program(source, target, shape, str(dtype).removeprefix("torch."), rank):
        tensor = _run(node, tensor, channel_of(group) if group else None)
    return tensor if rank in target.placement.coordinates else None


def box_groups(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that talk in a chain of boxing, in the order of their first use; the same on every rank."""
    chain = steps(source, target, shape, ITEM_SIZE[str(dtype).removeprefix("torch.")])
    return tuple(dict.fromkeys(group for step in chain for group in step_groups(step)))


@lru_cache(maxsize=4096)
def _program(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: str, rank: int
) -> tuple[tuple[LocalNode, tuple[int, ...]], ...]:
    """The nodes that `rank` runs, each with the ranks of its group; () for a local call."""
    source.check_dtype(dtype)
    target.check_dtype(dtype)
    found: list[tuple[LocalNode, tuple[int, ...]]] = []
    for step in steps(source, target, shape, ITEM_SIZE[dtype]):
        node = step_node(step, "x", "y", shape, dtype, rank, lambda _: 0)
        if node is not None:
            group = next((ranks for ranks in step_groups(step) if rank in ranks), ())
            found.append((node, group))
    return tuple(found)


def _run(node: LocalNode, tensor: Tensor | None, channel: Channel | None) -> Tensor | None:
    match node:
        case Transfer() if channel is not None:
            return run_transfer(channel, node, tensor)
        case Collective() if channel is not None and tensor is not None:
            return run_collectives(channel, (node,), [tensor])[0]
        case LocalCall() if tensor is not None:
            return _local(node, tensor)
    raise InternalError(f"this rank holds nothing to run {node} on")
