"""Recipe: the signature, boxing and kernels of one op on operands in given layouts; made once, then looked up."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any, final

import torch
from torch import Tensor

from weft.boxing import EXCHANGES, axis_bytes, steps
from weft.boxing.halo import Halo, call_halos
from weft.capture.fx.private import fake_mode
from weft.compiler.layouts.options import all_have_elements, work_cost
from weft.compiler.plans.specialize import Target, variant
from weft.compiler.signatures import halo_cost
from weft.errors import InternalError, LayoutError, RuleError, UserError
from weft.hardware import CostModel
from weft.ir.logical import Ref, Value
from weft.ir.plan import LocalCall, LocalValue, Transfer
from weft.layout import Broadcast, Layout, Placement, broadcast_layout
from weft.ops import (
    OpCall,
    Operand,
    Signature,
    TensorSpec,
    localize,
    signatures,
)
from weft.ops.call import map_argument, tensor_spec
from weft.ops.cost import dtype_name, tensor_bytes
from weft.ops.signatures import BLANK
from weft.ops.windows import signatures_with_windows, slides_at
from weft.runtime.channels.collectives import run_transfer
from weft.runtime.kernels.dense_operands import onednn_is_faster
from weft.runtime.kernels.generated import build_kernel
from weft.tensor.boxing import Chain, Locals, chain_between, check_strict, transfer_among_own
from weft.tensor.dispatch.operands import FloatSlot, Reader, op_name, takes_slots
from weft.tensor.divergence import meet, user_line
from weft.tensor.spec import Mesh, intern, open_channels
from weft.units import ITEM_SIZE, Bytes


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
    """The exchange of each operand, lying as `layouts` say; None if nothing is exchanged."""
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
        chains: how each operand is boxed; None if it stays.
        halos: the border rows of each operand to fetch from neighbours, or ().
        boxed: true if any operand is boxed.
        moved: bytes that boxing moves.
        kernels: for each rank of this process, a function of the operands' local tensors and the
            floats.
        listed: true if the op returns a list.
        viewed: true if the result should share its operand's memory, but may not.
        offsets: of the elements of views in the memory of their operand; () of other ops.
        advice: the operands' layouts and the legal ones, for messages.
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
    call = OpCall(
        op_name(op),
        tuple(map(reader.argument, args)),
        tuple(
            (key, reader.argument(value))
            for key, value in kwargs.items()
            if value is not None and key != "pin_memory"
        ),
        tuple(map(_tensor_spec, reader.tensors)),
        tuple(_tensor_spec(x) if isinstance(x, Tensor) else None for x in made),
    )
    # Plain tensors, all without dimensions, are the same on all ranks.
    everywhere = broadcast_layout(mesh.placement)
    layouts = [x.spec.layout if isinstance(x, kind) else everywhere for x in reader.tensors]
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
    local = []
    for rank in mesh.ranks:
        one, place = call, mesh.placement.coordinates[rank]
        for signature, parts, index in zip(chosen, mesh.placement.shape, place, strict=True):
            one = localize(one, signature, parts, index)
        local.append(one)
    kernels = (
        _kernel(one, len(reader.floats), mesh, rank)
        for one, rank in zip(local, mesh.ranks, strict=True)
    )
    lying = ", ".join(f"({', '.join(map(str, layout.sbp))})" for layout in layouts)
    legal = signatures(call, mesh.placement.shape[0])
    some = "; ".join(map(str, legal[:8])) + ("; …" if len(legal) > 8 else "")
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
        advice=f"operands are laid out as {lying}; legal along an axis: {some}",
        token=zlib.crc32(f"{call} {call.args} {call.kwargs} {layouts}".encode()),
    )


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
    order, function = [given.index(name) for name in kernel.inputs], kernel.function
    if order == list(range(len(given))):
        return lambda *values: function(None, *values)
    return lambda *values: function(None, *[values[place] for place in order])


# The signature that an eager op runs with: the cheapest in boxing and work, given how its operands are laid out.
#
# The compiled path weighs a whole graph; here one op is seen at a time. So that a result is laid out as its
# operands do, an axis along which they already fit a signature keeps it. A split that leaves ranks
# empty is chosen only where an operand is laid out so already.


PerAxis = tuple[Signature, ...]

_COST = CostModel()

# Beyond two axes only so many signatures of an axis are looked at, those that are cheapest to box
# into.
_CANDIDATES = 6


def choose(
    call: OpCall, layouts: Sequence[Layout], placement: Placement, fixed: Collection[int] = ()
) -> PerAxis:
    """One signature for each axis of `placement`.

    Args:
        fixed: operands that stay Broadcast.

    Raises:
        RuleError: when the op has no rule.
    """
    found: dict[PerAxis, float] = {}
    for keep in (True, False):
        search = _SignatureSearch(call, tuple(layouts), placement, tuple(fixed), keep)
        for chosen, local in search.candidates(call, call, ()):
            found.setdefault(chosen, search.cost(chosen, local))
        if found:
            return min(found, key=lambda chosen: found[chosen])
    return tuple(signatures(call, parts)[0] for parts in placement.shape)


def operand_layout(chosen: PerAxis, operand: int, placement: Placement) -> Layout:
    """The layout that an operand must have."""
    return Layout(placement, tuple(signature.operands[operand] for signature in chosen))


@final
class _SignatureSearch:
    """All signatures of the grid's axes, outermost first. `keep`: an axis that fits stays as it is."""

    def __init__(
        self,
        call: OpCall,
        layouts: tuple[Layout, ...],
        placement: Placement,
        fixed: tuple[int, ...],
        keep: bool,
    ) -> None:
        self.call = call
        self.layouts = layouts
        self.placement = placement
        self.fixed = fixed
        self.keep = keep
        # Whether operands leave ranks empty, so that others may too.
        by_axis = zip(*(layout.sbp for layout in layouts), strict=True)
        given = tuple(Signature(operands, ()) for operands in by_axis)
        self.empty = not all_have_elements(replace(call, results=()), given, placement.shape)

    def candidates(
        self, call: OpCall, least: OpCall, chosen: PerAxis
    ) -> Iterator[tuple[PerAxis, OpCall]]:
        """Every combination, with the call of the rank with the largest shards; `least` is that with the smallest."""
        axis = len(chosen)
        grid = self.placement.shape
        if axis == len(grid):
            if self.empty or all_have_elements(self.call, chosen, grid):
                yield chosen, call
            return
        for signature in self._of_axis(call, axis):
            # A rank with the smallest shards must run the signature too: some kernels take no empty shards.
            few = least.op != BLANK and self.empty
            if few and signature not in signatures_with_windows(least, grid[axis], True):
                continue
            local = localize(call, signature, grid[axis], 0)
            last = localize(least, signature, grid[axis], grid[axis] - 1) if self.empty else local
            yield from self.candidates(local, last, (*chosen, signature))

    def cost(self, chosen: PerAxis, local: OpCall) -> float:
        """Boxing of all operands and work of all ranks, in bytes."""
        total = work_cost(local, self.placement.shape, _COST)
        for operand, (spec, layout) in enumerate(
            zip(self.call.operands, self.layouts, strict=True)
        ):
            total += _boxing(spec, layout, operand_layout(chosen, operand, self.placement))
        if slides_at(self.call.op):
            call, grid = self.call, self.placement.shape
            for axis, signature in enumerate(chosen):
                total += halo_cost(call, signature, grid, axis, _COST)
                call = localize(call, signature, grid[axis], 0)
        return total

    def _of_axis(self, call: OpCall, axis: int) -> Sequence[Signature]:
        every = [
            signature
            for signature in signatures_with_windows(call, self.placement.shape[axis], self.empty)
            if all(signature.operands[index] == Broadcast() for index in self.fixed)
        ]
        here = tuple(layout.sbp[axis] for layout in self.layouts)
        fit = [signature for signature in every if signature.operands == here]
        if fit and self.keep:
            return fit
        if self.placement.axes > 2:
            parts = self.placement.shape[axis]
            sizes = [tensor_bytes(spec) for spec in self.call.operands]

            def moved(one: Signature) -> int:
                pairs = zip(here, one.operands, sizes, strict=True)
                return sum(axis_bytes(now, wanted, parts, size) for now, wanted, size in pairs)

            return nsmallest(_CANDIDATES, every, key=moved)
        return every


def _boxing(spec: TensorSpec, source: Layout, target: Layout) -> float:
    if source == target:
        return 0.0
    chain = steps(source, target, spec.shape, ITEM_SIZE.get(spec.dtype, 8))
    collectives = sum(step.kind in EXCHANGES for step in chain)
    return _COST.boxing(Bytes(sum(step.bytes for step in chain)), collectives)
