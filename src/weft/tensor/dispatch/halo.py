"""Border rows that ranks fetch from each other before a convolution or pooling of a spatial split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.boxing.halo import Halo, call_halos
from weft.ir.logical import Value
from weft.ir.plan import Transfer
from weft.layout import Layout
from weft.ops import OpCall, Signature
from weft.runtime.channels.collectives import run_transfer
from weft.tensor.chain import Locals, transfer_among_own
from weft.tensor.divergence import meet
from weft.tensor.mesh import Mesh, open_channels


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """One operand's exchange.

    Attributes:
        halo: who reads which rows.
        mesh: of the operand.
        nodes: what each rank of this process does.
    """

    halo: Halo
    mesh: Mesh
    nodes: tuple[Transfer, ...]

    def run(self, locals_: Locals, what: str) -> Locals:
        """The windows that this process's ranks read; `what` asks for them."""
        halo, mesh = self.halo, self.mesh
        if mesh.in_process:
            return transfer_among_own(halo.group_of, self.nodes, locals_, mesh)
        open_channels(mesh.world, halo.groups)
        made = []
        for rank, node, tensor in zip(mesh.ranks, self.nodes, locals_, strict=True):
            rows = f"{what}: border rows of {halo.value.dtype} {halo.value.shape}"
            channel = meet(mesh.world, halo.group_of(rank), rows)
            found = run_transfer(channel, node, tensor)
            assert found is not None  # every rank reads some rows
            made.append(found)
        return tuple(made)


def exchanges(
    call: OpCall, chosen: Sequence[Signature], layouts: Sequence[Layout], mesh: Mesh
) -> tuple[Exchange | None, ...]:
    """The exchange of each operand, lying as `layouts` say; None where nothing is exchanged."""
    if not call.operands:
        return ()
    values = [
        Value("x", spec.shape, spec.dtype, layout)
        for spec, layout in zip(call.operands, layouts, strict=True)
    ]
    found = call_halos(call, chosen, values)
    return tuple(
        _exchange(found[number], mesh) if number in found else None for number in range(len(values))
    )


def _exchange(halo: Halo, mesh: Mesh) -> Exchange:
    return Exchange(halo, mesh, tuple(halo.transfer(rank, 0, "x", "y") for rank in mesh.ranks))
