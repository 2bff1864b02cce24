"""The arguments of an op: its operands on one placement, the cache key of decisions, whole copies.

All operands are on one placement; plain tensors among them are the same on all ranks.

Operands on several placements of one model (its stages) are moved to one placement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.optimizers import fused
from weft.errors import LayoutError, UserError
from weft.layout import Layout, Placement, broadcast_layout
from weft.ops import Operand
from weft.ops.call import Argument
from weft.runtime.torch_ops import token
from weft.tensor.boxing import box
from weft.tensor.divergence import note_plain, user_line
from weft.tensor.spec import Mesh, intern


def common_mesh(kind: Any, op: Any, tensors: Sequence[Any]) -> Mesh:
    """The mesh of all global operands; that of the largest family, if there are several.

    Raises:
        LayoutError: naming op, line and what each operand is.
    """
    meshes: dict[Mesh, None] = dict.fromkeys(
        tensor.spec.mesh for tensor in tensors if isinstance(tensor, kind)
    )
    if len({mesh.placement for mesh in meshes}) > 1:
        listed = (
            str(x.spec) if isinstance(x, kind) else f"a plain {list(x.shape)} on {x.device}"
            for x in tensors
        )
        raise LayoutError(
            f"{user_line()}: {op} has operands on different placements: {', '.join(listed)}. Bring them to one: "
            "x.to_global(placement=…, sbp=…)"
        )
    first = next(iter(meshes))
    if not all(mesh.same_job(first) for mesh in meshes):
        raise LayoutError(
            f"{user_line()}: {op} has operands of different worlds; tensors of a local world cannot meet those "
            "of several processes: make all of them inside of weft.local_world, or all outside of it"
        )
    return max(meshes, key=lambda mesh: len(mesh.family))


def as_global(kind: Any, op: Any, mesh: Mesh, value: Any) -> Any:
    """An argument with its plain tensors as global ones, Broadcast.

    Scalars stay, as they are promoted otherwise; so do sparse tensors, which are never global.

    The next communication checks that they are the same on all ranks.

    Raises:
        LayoutError: for a plain tensor that wants a gradient.
    """
    if isinstance(value, list | tuple):
        parts = [as_global(kind, op, mesh, part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if not isinstance(value, Tensor) or isinstance(value, kind):
        return value
    note_plain(mesh, value)
    if not value.dim():
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            f"{user_line()}: {op} mixes global tensors and a plain {list(value.shape)} that wants a gradient. Make it "
            "global: weft.tensor(x, placement=…, sbp=…) when each process has the whole, weft.from_local(x, …) when it "
            "has its own part, weft.distribute(module, …) for parameters"
        )
    if value.layout != torch.strided:
        return value
    return everywhere(kind, mesh, value)


def everywhere(kind: Any, mesh: Mesh, tensor: Tensor) -> Any:
    """A plain tensor that is the same on all ranks, as a global one that shares its memory."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    layout = broadcast_layout(mesh.placement)
    spec = intern(mesh, layout, whole.shape, whole.stride(), whole.dtype)
    return kind(spec, tuple(whole.to(mesh.device_of(rank)) for rank in mesh.ranks))


def on_one_placement(
    kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op with all global tensors on one placement, where parts of one model are on several.

    The placement is that of the tensor that the op writes, else of a parameter or buffer of a compiled model,
    which stay where they are, else of the first operand. Other operands stay, and the caller raises the error.
    """
    if fused.updates(op) or op._schema.name.startswith("aten::_foreach_"):
        return args, kwargs  # they take their lists apart
    every = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, kind)]
    meshes = [x.spec.mesh for x in every]
    placements = {mesh.placement for mesh in meshes}
    if len(placements) < 2 or not all(
        placements <= mesh.family and mesh.same_job(meshes[0]) for mesh in meshes
    ):
        return args, kwargs
    held = [x for x in every if x.hold is not None and not op._schema.is_mutable]
    mesh = (held or every)[0].spec.mesh

    def moved(value: Any) -> Any:
        return to_mesh(kind, value, mesh, str(op)) if isinstance(value, kind) else value

    return pytree.tree_map(moved, args), pytree.tree_map(moved, kwargs)


def to_mesh(kind: Any, tensor: Any, mesh: Mesh, why: str) -> Any:
    """A global tensor on another placement, laid as it was where the two are alike."""
    if tensor.placement == mesh.placement:
        return tensor
    here, there = tensor.spec.layout, mesh.placement
    alike = here.placement.shape == there.shape
    target = Layout(there, here.sbp) if alike else broadcast_layout(there)
    return kind(*box(tensor.spec, tensor.locals, target, mesh, implicit=why))


# The arguments of a dispatched op: a key to remember decisions by, and the `OpCall` that the rules see.
#
# Numbers that change from call to call, such as an optimizer's step size, must not make a new
# decision each time. So for pointwise ops a float that is not a whole number is a `FloatSlot`: the rules see
# its value at the first call, kernels take it as an argument. Elsewhere, where shapes may depend on
# it, a float belongs to the key.


@final
class FloatSlot(float):
    """A float that a kernel takes as argument number `index` of its floats."""

    index: int

    def __new__(cls, value: float, index: int) -> FloatSlot:
        slot = super().__new__(cls, value)
        slot.index = index
        return slot


@final
class Reader:
    """Reads arguments in order, collecting tensors and floats.

    Args:
        slots: true if floats may be slots.
    """

    def __init__(self, kind: Any, slots: bool = False) -> None:
        self._kind = kind
        self._slots = slots
        self.tensors: list[Any] = []
        self.floats: list[float] = []
        # True if plain tensors are among them, and such as are not strided.
        self.plain = self.sparse = False

    def key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The key by which it is decided how an op with these arguments is run."""
        kind, found = self._kind, []
        for value in args:
            of = value.__class__
            if of is kind:
                self.tensors.append(value)
                found.append(value.spec)
            elif of is int or of is bool:
                found.append((of, value))
            elif of is float:
                if self._is_slot(value):
                    self.floats.append(value)
                    found.append(value > 0)
                else:  # by its text: 0.0 and -0.0 are equal, and nan differs from itself
                    found.append((float, str(value)))
            elif value is None:
                found.append(None)
            else:
                found.append(self._other(value))
        return tuple(found)

    def _is_slot(self, value: float) -> bool:
        return self._slots and math.isfinite(value) and not value.is_integer()

    def _other(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return self.key(tuple(value))
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.plain = True
            self.sparse = self.sparse or value.layout != torch.strided
            return (Tensor, value.dtype, value.shape, value.device.type)
        return value

    def argument(self, value: Any) -> Argument:
        """The argument as sharding rules see it."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return Operand(len(self.tensors) - 1)
        if isinstance(value, list | tuple):
            return tuple(self.argument(part) for part in value)
        if type(value) is float and self._is_slot(value):
            self.floats.append(value)
            return FloatSlot(value, len(self.floats) - 1)
        constant: Argument = token(value)
        return constant


def tensors_in(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors among the arguments of an op, in order."""
    reader = Reader(kind)
    reader.key((*args, *kwargs.values()))
    return reader.tensors


def takes_slots(op: torch._ops.OpOverload[Any, Any]) -> bool:
    """True if the numbers among an op's arguments change nothing but values."""
    return torch.Tag.pointwise in op.tags


def op_name(op: torch._ops.OpOverload[Any, Any]) -> str:
    """The name that rules know an op by."""
    return str(op).removesuffix(".default") if op.namespace == "weft" else str(op)


# Ops that run whole at once: operands are gathered, every rank computes all, the result is Broadcast.
#
# So run ops whose results depend on values in more than their elements (shapes, numbers for Python), those that
# have no rule, and those of sparse tensors.


def run_on_whole_copies(
    kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = None
) -> Any:
    """The results of `op`, or of a function in its place, on whole copies of its operands, which it may write."""
    run = function or op
    home = common_mesh(kind, op, tensors_in(kind, args, kwargs))
    mesh = of_all(home)
    if not mesh.ranks:
        raise UserError(
            f"{user_line()}: {op}: this process has no rank of {mesh.placement}; call it on ranks of the placement "
            "only, or bring the operands to one that has this rank: x.to_global(placement=…, sbp=…)"
        )
    leaves, tree = pytree.tree_flatten((args, kwargs))
    copies = [_on_each_rank(kind, op, mesh, as_global(kind, op, mesh, leaf)) for leaf in leaves]
    made = []
    for place in range(len(mesh.ranks)):
        own, named = pytree.tree_unflatten([each[place] for each in copies], tree)
        made.append(run(*own, **named))
    results, structure = pytree.tree_flatten(made[0])
    every = [pytree.tree_leaves(each) for each in made]
    parts = [
        joined_copies(kind, mesh, [each[i] for each in every]) if isinstance(x, Tensor) else x
        for i, x in enumerate(results)
    ]
    joined = pytree.tree_unflatten(parts, structure)
    if mesh is home:
        return joined

    def back(x: Any) -> Any:
        return kind(*box(x.spec, x.locals, broadcast_layout(home.placement), home))

    return pytree.tree_map_only(kind, back, joined)


def of_all(mesh: Mesh) -> Mesh:
    """The mesh itself, or, for tensors of a model whose stages are on several processes, that of the whole job.

    Every process calls an op of such a model, and wants a result that is not a global tensor.
    """
    if all(mesh.at(each).in_process for each in mesh.family):
        return mesh
    size = mesh.world.size
    return mesh.at(Placement(mesh.placement.device_type, (size,), tuple(range(size))))


def _on_each_rank(kind: Any, op: Any, mesh: Mesh, value: Any) -> Sequence[Any]:
    """An argument for each rank of this process: copies of whole tensors, all else as it is."""
    if isinstance(value, kind):
        target = broadcast_layout(mesh.placement)
        _, own = box(value.spec, value.locals, target, mesh, implicit=str(op))
        return [part.clone() for part in own]
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return [value.to(mesh.device_of(rank)) for rank in mesh.ranks]
    return [value] * len(mesh.ranks)


def joined_copies(kind: Any, mesh: Mesh, made: Sequence[Tensor]) -> Any:
    """A Broadcast tensor of the copies of all ranks of this process.

    Raises:
        UserError: when it is not strided.
    """
    if made[0].layout != torch.strided:
        raise UserError(
            f"{user_line()}: the result is {made[0].layout}, and global tensors are strided: take it of the whole "
            "tensor, x.full(), or of the dense form of what is sparse, to_dense()"
        )
    own = tuple(x.resolve_conj().resolve_neg() for x in made)
    layout = broadcast_layout(mesh.placement)
    return kind(intern(mesh, layout, own[0].shape, own[0].stride(), own[0].dtype), own)


def all_global(kind: Any, mesh: Mesh, made: Any) -> Any:
    """Results that were made of global tensors; a plain one among them, of no values of theirs, becomes global too."""

    def made_global(x: Any) -> Any:
        plain = isinstance(x, Tensor) and not isinstance(x, kind)
        return everywhere(kind, mesh, x) if plain else x

    return pytree.tree_map(made_global, made)
