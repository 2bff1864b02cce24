"""Recipe: how one op runs on operands that lie in given layouts; made once, then looked up."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from weft.boxing.halo import Halo, call_halos
from weft.capture.fx.private import fake_mode
from weft.compiler.plans.specialize import Target, variant
from weft.errors import InternalError, LayoutError, RuleError, UserError
from weft.ir.logical import Ref, Value
from weft.ir.plan import LocalCall, LocalValue, Transfer
from weft.layout import Layout, broadcast_layout
from weft.ops import OpCall, Operand, Signature, TensorSpec, localize, signatures
from weft.ops.call import map_argument, tensor_spec
from weft.ops.cost import dtype_name
from weft.ops.signatures import BLANK
from weft.runtime.channels.collectives import run_transfer
from weft.runtime.kernels.dense_operands import onednn_is_faster
from weft.runtime.kernels.generated import build_kernel
from weft.tensor.boxing import Chain, Locals, chain_between, check_strict, transfer_among_own
from weft.tensor.dispatch.choose import PerAxis, choose, operand_layout
from weft.tensor.dispatch.operands import FloatSlot, Reader, op_name, takes_slots
from weft.tensor.divergence import meet, user_line
from weft.tensor.spec import Mesh, intern, open_channels


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """One operand's exchange."""

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
    found: list[Exchange | None] = [None] * len(values)
    for number, halo in call_halos(call, chosen, values).items():
        nodes = tuple(halo.transfer(rank, 0, "x", "y") for rank in mesh.ranks)
        found[number] = Exchange(halo, mesh, nodes)
    return tuple(found)


Kernel = Callable[..., tuple[Tensor, ...]]


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of an op.

    Attributes:
        chains: how each operand is boxed; None where it stays.
        halos: what ranks then fetch of each operand from their neighbours, or ().
        boxed: true where any operand is boxed.
        moved: bytes that boxing moves.
        kernels: for each rank of this process, a function of the operands' local tensors and the
            floats.
        listed: true where the op returns a list.
        viewed: true where the result should share its operand's memory, but may not.
        offsets: of the elements of views in the memory of their operand; () of other ops.
        advice: layouts found and legal ones, for messages.
        token: a checksum of the op, its arguments but for the tensors' values and the floats, and the layouts.
    """

    op: str
    mesh: Mesh
    chains: tuple[Chain | None, ...]
    halos: tuple[Exchange | None, ...]
    boxed: bool
    moved: int
    kernels: tuple[Kernel, ...]
    results: tuple[Any, ...]
    listed: bool
    viewed: bool
    offsets: tuple[int, ...]
    advice: str
    token: int

    def run(self, locals_: list[Locals], floats: list[float]) -> list[tuple[Tensor, ...]]:
        """The results of each rank of this process, given the local tensors of every operand."""
        if self.boxed:
            check_strict(self.moved, self.op, self.advice)
            locals_ = [
                own if chain is None else chain.run(own, self.op)
                for own, chain in zip(locals_, self.chains, strict=True)
            ]
        if self.halos:
            locals_ = [
                own if halo is None else halo.run(own, self.op)
                for own, halo in zip(locals_, self.halos, strict=True)
            ]
        if len(self.kernels) == 1:
            return [self.kernels[0](*[own[0] for own in locals_], *floats)]
        return [
            kernel(*[own[place] for own in locals_], *floats)
            for place, kernel in enumerate(self.kernels)
        ]


def make_recipe(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, kind: Any
) -> Recipe:
    """Choose signatures and build kernels for an op on operands like those in `args` and `kwargs`.

    Raises:
        RuleError: when the op has no rule.
        UserError: when torch refuses the shapes or dtypes of the whole tensors.
    """
    reader = Reader(kind, takes_slots(op))
    whole = _whole_results(op, args, kwargs, kind)
    listed = isinstance(whole, tuple | list)
    made = tuple(whole) if listed else (whole,)
    call = _op_call(op, args, kwargs, reader, made)
    layouts = [_layout(tensor, mesh) for tensor in reader.tensors]
    plain = [i for i, tensor in enumerate(reader.tensors) if not isinstance(tensor, kind)]
    try:
        chosen = choose(call, layouts, mesh.placement, plain)
    except RuleError as error:
        raise RuleError(f"{user_line()}: {error}") from None
    wanted = [operand_layout(chosen, index, mesh.placement) for index in range(len(layouts))]
    chains = tuple(
        None if index in plain else chain_between(tensor.spec, wanted[index])
        for index, tensor in enumerate(reader.tensors)
    )
    halos = exchanges(call, chosen, wanted, mesh)
    local = [_localized(call, chosen, mesh, rank) for rank in mesh.ranks]
    kernels = (
        _kernel(one, len(reader.floats), mesh, rank)
        for one, rank in zip(local, mesh.ranks, strict=True)
    )
    return Recipe(
        op=call.op,
        mesh=mesh,
        chains=chains,
        halos=halos if any(halos) else (),
        boxed=any(chain is not None for chain in chains),
        moved=sum(chain.bytes for chain in chains if chain is not None),
        kernels=tuple(kernels),
        results=_result_specs(made, chosen, mesh),
        listed=listed,
        viewed=_is_view(op) and (any(chains) or any(one.op != call.op for one in local)),
        offsets=tuple(x.storage_offset() for x in made) if _is_view(op) else (),
        advice=_advice(call, layouts, mesh),
        token=zlib.crc32(f"{call} {call.args} {call.kwargs} {layouts}".encode()),
    )


def _op_call(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reader: Reader,
    made: tuple[Any, ...],
) -> OpCall:
    tree = tuple(map(reader.argument, args))
    named = tuple(
        (key, reader.argument(value))
        for key, value in kwargs.items()
        if value is not None and key != "pin_memory"
    )
    results = tuple(_tensor_spec(x) if isinstance(x, Tensor) else None for x in made)
    return OpCall(op_name(op), tree, named, tuple(map(_tensor_spec, reader.tensors)), results)


def _result_specs(made: tuple[Any, ...], chosen: PerAxis, mesh: Mesh) -> tuple[Any, ...]:
    def spec(index: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        sbp = tuple(signature.results[index] for signature in chosen)
        layout = Layout(mesh.placement, sbp)
        if value.device.type != mesh.placement.device_type:
            raise LayoutError(
                f"{user_line()}: a tensor on {mesh.placement} cannot go to {value.device}; take x.full() there, and "
                "make it global again with weft.tensor on a placement of that device"
            )
        if value.layout != torch.strided:
            raise UserError(
                f"{user_line()}: global tensors are strided, got {value.layout}; use x.full()"
            )
        return intern(mesh, layout, value.shape, value.stride(), value.dtype)

    return tuple(spec(index, value) for index, value in enumerate(made))


def _layout(tensor: Any, mesh: Mesh) -> Layout:
    """Plain tensors, all without dimensions, are the same on all ranks."""
    spec = getattr(tensor, "spec", None)
    return broadcast_layout(mesh.placement) if spec is None else spec.layout


def _tensor_spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))


def _whole_results(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any) -> Any:
    mode = fake_mode()
    found: list[str] = []

    def fake(value: Any) -> Any:
        if isinstance(value, kind):
            found.append(str(value.spec))
            shape, strides = value.shape, value.stride()
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        if isinstance(value, Tensor):
            return mode.from_tensor(value)
        return [fake(part) for part in value] if isinstance(value, list | tuple) else value

    try:
        with mode:
            return op(*map(fake, args), **{key: fake(value) for key, value in kwargs.items()})
    except Exception as error:
        why = str(error).strip() or type(error).__name__
        if type(error).__name__.startswith(("Dynamic", "DataDependent")):
            why = "the shape of its result depends on values; take a plain tensor first, x.full()"
        raise UserError(f"{user_line()}: {op} of {', '.join(found)} cannot run: {why}") from error


def _is_view(op: Any) -> bool:
    return any(result.alias_info is not None for result in op._schema.returns)


def _localized(call: OpCall, chosen: PerAxis, mesh: Mesh, rank: int) -> OpCall:
    place = mesh.placement.coordinates[rank]
    for signature, parts, index in zip(chosen, mesh.placement.shape, place, strict=True):
        call = localize(call, signature, parts, index)
    return call


def _kernel(call: OpCall, floats: int, mesh: Mesh, rank: int) -> Kernel:
    def back(leaf: Any) -> Any:
        if isinstance(leaf, FloatSlot):
            return Ref(f"f{leaf.index}", tensor_spec((), "float64"))
        return (
            Ref(f"t{leaf.index}", call.operands[leaf.index]) if isinstance(leaf, Operand) else leaf
        )

    outputs = tuple(
        None if spec is None else LocalValue(f"r{index}", spec.shape, spec.dtype)
        for index, spec in enumerate(call.results)
    )
    kwargs = tuple((key, map_argument(back, value)) for key, value in call.kwargs)
    local = LocalCall.of(call.op, map_argument(back, call.args), outputs, kwargs=kwargs)
    names = [value.name for value in outputs if value is not None]
    device = mesh.device_of(rank)
    local = variant(local, Target(device.type, onednn_is_faster()))
    kernel = build_kernel((local,), names, device)
    given = [f"t{index}" for index in range(len(call.operands))]
    given += [f"f{index}" for index in range(floats)]
    lost = any(name[0] == "f" and name not in kernel.inputs for name in given)
    if lost and call.op != BLANK:
        raise InternalError(f"the rule of {call.op} lost a number: {kernel.source}")
    return _in_order(kernel.function, [given.index(name) for name in kernel.inputs], len(given))


def _in_order(function: Kernel, order: Sequence[int], count: int) -> Kernel:
    if list(order) == list(range(count)):
        return lambda *values: function(None, *values)
    return lambda *values: function(None, *[values[place] for place in order])


def _advice(call: OpCall, layouts: Sequence[Layout], mesh: Mesh) -> str:
    found = ", ".join(f"({', '.join(map(str, layout.sbp))})" for layout in layouts)
    legal = signatures(call, mesh.placement.shape[0])
    some = "; ".join(map(str, legal[:8])) + ("; …" if len(legal) > 8 else "")
    return f"operands lie as {found}; legal along an axis: {some}"
