"""Global tensors as text, without communication: any single rank may print one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weft.layout import Broadcast, Shares
from weft.tensor.boxing import assemble
from weft.tensor.dispatch.shares import in_order
from weft.tensor.spec import Spec


def show(
    spec: Spec, parts: Mapping[int, Tensor], requires_grad: bool, shares: Shares | None
) -> str:
    """The whole value where this process holds it, else this rank's part as it is stored; then the layout."""
    sbp = ", ".join(map(str, spec.layout.sbp))
    tail = f"placement={spec.layout.placement}, sbp=({sbp})"
    if shares is not None:
        tail += f", stored in {shares}"
    if requires_grad:
        tail += ", requires_grad=True"
    whole = None
    if spec.mesh.in_process:
        whole = assemble(spec, parts)
    elif parts and all(part == Broadcast() for part in spec.layout.sbp):
        whole = next(iter(parts.values()))
    if whole is not None:
        return f"weft.{str(in_order(whole, shares))[:-1]}, {tail})"
    head = f"weft.tensor(shape={list(spec.shape)}, dtype={spec.tensor.dtype}"
    held = "".join(f", rank {rank} holds {part}" for rank, part in parts.items())
    return f"{head}, {tail}{held})"
