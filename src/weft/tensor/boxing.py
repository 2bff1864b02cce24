"""Boxing of global tensors between any two layouts, across placements too."""

from __future__ import annotations

from weft.layout import Layout
from weft.tensor.chain import Locals, chain_between
from weft.tensor.mesh import Mesh
from weft.tensor.spec import Spec
from weft.tensor.strict import check_strict
from weft.tensor.whole import assemble, cut


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
