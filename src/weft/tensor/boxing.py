"""Boxing of global tensors between any two layouts, across placements too; from whole tensors to parts, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from weft.errors import LayoutError
from weft.layout import SBP, Broadcast, Layout, Split
from weft.runtime.channels.channel import reduce_in_order
from weft.runtime.memory.state import local_part
from weft.tensor.chain import Locals, chain_between
from weft.tensor.divergence import meet, user_line
from weft.tensor.mesh import Mesh
from weft.tensor.spec import Spec, contiguous, without_partials


def cut(whole: Tensor, layout: Layout, mesh: Mesh) -> tuple[Spec, Locals]:
    """The parts of a whole tensor that this process's ranks hold, as copies."""
    plain = without_partials(layout)
    spec = contiguous(mesh, plain, tuple(whole.shape), whole.dtype)
    parts = tuple(
        local_part(whole, plain, rank).to(mesh.device_of(rank), copy=True) for rank in mesh.ranks
    )
    return laid(spec, tuple(part.contiguous() for part in parts), layout)


def laid(spec: Spec, locals_: Locals, layout: Layout) -> tuple[Spec, Locals]:
    """Fresh local tensors brought from a layout without Partial to one that may have it; nothing is sent."""
    chain = chain_between(spec, layout)
    return spec.with_layout(layout), chain.run(locals_, "creation") if chain else locals_


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
    """The same tensor as `target` says; `mesh` is that of its placement.

    Args:
        implicit: who needs it without having been told to, for strict mode.

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
    if spec.layout.placement != target.placement and spec.mesh.in_process and mesh.in_process:
        whole = assemble(spec, dict(zip(spec.mesh.ranks, locals_, strict=True)))
        return spec.with_layout(target, mesh), cut(whole, target, mesh)[1]
    return spec.with_layout(target, mesh), chain.run(locals_, implicit or "to_global")


_strict: ContextVar[bool] = ContextVar("weft_strict_boxing", default=False)


@contextmanager
def strict_boxing() -> Iterator[None]:
    """While this lasts, an op on global tensors whose operands would have to be moved raises LayoutError.

    `to_global` and `full` still move what they are told to.
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
