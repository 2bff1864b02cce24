"""GlobalTensor: one whole tensor that is on the ranks of a placement, computed with eagerly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from weft.boxing import gradient_layout
from weft.errors import LayoutError, UserError
from weft.layout import SBP, Broadcast, Layout, Placement, Shares, Split, broadcast_layout
from weft.tensor.boxing import Locals, assemble
from weft.tensor.dispatch.dispatch import dispatch
from weft.tensor.dispatch.interleaved import (
    change_layout,
    check_order,
    in_order,
    parted_aliases,
    stored_in,
)
from weft.tensor.dispatch.operands import of_all
from weft.tensor.divergence import user_line
from weft.tensor.spec import Spec, contiguous, layout_for


@final
class GlobalTensor(Tensor):
    """A tensor of the whole shape whose data is on the ranks of a placement, as its layout says.

    It computes like any tensor: ops choose how their results are laid out by the same rules as `weft.compile`,
    operands that are laid out differently are boxed. Made by `weft.tensor`, `weft.randn`, `weft.from_local`, …

    Attributes:
        spec: shape, dtype and layout.
        locals: the local tensors of this process's ranks, in the placement's order.
        shares: of a variable of a compiled model, and of its gradient and states: that the local tensors are stored
            in shares of the parts that it joins. Ops on the tensor see the usual order; None for others.
        hold: what works with the memory of a parameter or buffer of a compiled model, whose memory
            then stays where it is; None for others.
    """

    spec: Spec
    locals: Locals
    shares: Shares | None = None
    hold: Any = None

    @staticmethod
    def __new__(cls, spec: Spec, locals_: Locals, offset: int = 0) -> GlobalTensor:
        # Autograd finds by the offset which elements of its base a view holds.
        made: GlobalTensor = _make_wrapper(
            cls,
            spec.shape,
            strides=spec.strides,
            storage_offset=offset,
            dtype=spec.dtype,
            device=spec.mesh.device,
        )
        made.spec = spec
        made.locals = locals_
        return made

    # Ops are seen below autograd only.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return dispatch(cls, func, args, kwargs or {})

    @property
    def placement(self) -> Placement:
        """The grid of ranks that it is on."""
        return self.spec.layout.placement

    @property
    def sbp(self) -> tuple[SBP, ...]:
        """One SBP for each axis of the placement."""
        return self.spec.layout.sbp

    def to_global(
        self, *, placement: Placement | None = None, sbp: SBP | Sequence[SBP] | None = None
    ) -> GlobalTensor:
        """The same tensor in another layout; differentiable. Local tensors are never in shares.

        Args:
            placement: by default the same.
            sbp: one SBP, or one for each axis; by default the same.

        Raises:
            LayoutError: when the layout does not fit the tensor or the world.
        """
        there = placement or self.placement
        layout = layout_for(there, self.sbp if sbp is None else sbp, self.shape, "to_global")
        if layout == self.spec.layout and self.shares is None:
            return self
        moved: GlobalTensor = _ToGlobal.apply(self, layout)  # type: ignore[no-untyped-call]
        return moved

    def to_local(self) -> Tensor:
        """The local tensor of this process's rank, sharing memory.

        Differentiable: each rank's gradient is that of what it computes itself, so that gradients
        of what is Broadcast add up over the ranks.

        Raises:
            UserError: when this process has several ranks of the placement, or none; for a tensor
                that is stored in shares.
        """
        check_order(self, "to_local")
        ranks = self.spec.mesh.ranks
        if len(ranks) != 1:
            raise UserError(
                f"to_local needs exactly one rank in this process, got {list(ranks)} of {self.placement}; use "
                "shards(), which gives {rank: local tensor}"
            )
        part: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
        return part

    def shards(self) -> dict[int, Tensor]:
        """The local tensor of every rank of this process, sharing memory, without gradients.

        Raises:
            UserError: for a tensor that is stored in shares.
        """
        check_order(self, "shards")
        return dict(zip(self.spec.mesh.ranks, self.locals, strict=True))

    def full(self) -> Tensor:
        """A plain copy of the whole tensor; differentiable. Every process of the placement must call it.

        If the model's stages are on several placements, every process of the job must call it; all get the result.

        Raises:
            UserError: when this process has no rank of the placement.
        """
        there = of_all(self.spec.mesh).placement
        whole = self.to_global(placement=there, sbp=broadcast_layout(there).sbp)
        if not whole.locals:
            raise UserError(
                f"full: this process has no rank of {self.placement}; call it on ranks of the placement only, or "
                "bring the tensor to one that has this rank: x.to_global(placement=…, sbp=…)"
            )
        plain: Tensor = _Full.apply(whole)  # type: ignore[no-untyped-call]
        return plain

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.hold is not None:
            self._write(value)
        elif not isinstance(value, GlobalTensor):
            raise LayoutError(
                f"{user_line()}: the data of {self.spec} can be replaced by a global tensor only, got a plain one; "
                "make it global with weft.tensor or weft.from_local"
            )
        else:
            self.become(value)

    def _write(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UserError(
                f"{user_line()}: {self.spec} is a variable of a compiled model and keeps shape and dtype; got "
                f"{value.dtype} {list(value.shape)}. weft.release(model) gives the model back, to be converted"
            )
        if isinstance(value, GlobalTensor) and _places(value) == _places(self):
            return
        # `.data = …` leaves tensors that share this variable's memory what they had, in memory of their own.
        living = parted_aliases(self)
        parts = self.locals if living else ()
        own = {part.untyped_storage().data_ptr(): (part, part.clone()) for part in parts}
        for each in living:
            each.locals = tuple([_moved_along(part, own) for part in each.locals])
        with torch.no_grad():
            self.detach().copy_(value)

    def become(self, value: GlobalTensor) -> None:
        """Take over shape, layout and memory of another global tensor.

        Raises:
            UserError: for a variable of a compiled model, whose memory others work with.
        """
        if self.hold is not None:
            raise UserError(
                f"{user_line()}: {self.spec} is a variable of a compiled model and keeps shape and memory; write its "
                "values, as with copy_, or give the model back with weft.release(model)"
            )
        _data.__set__(self, value)
        self.spec, self.locals, self.shares = value.spec, value.locals, value.shares

    def __format__(self, form: str) -> str:
        return format(self.item() if form and not self.dim() else str(self), form)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = dict(zip(self.spec.mesh.ranks, self.locals, strict=True))
        return show(self.spec, parts, self.requires_grad, self.shares)

    def _here(self, what: str) -> Tensor:
        """The whole tensor, where this process has it: the memory of its first rank; `what` is done with it."""
        grid = self.placement.shape
        parted = any(n > 1 and sbp != Broadcast() for n, sbp in zip(grid, self.sbp, strict=True))
        if parted or not self.locals or self.shares is not None:
            raise UserError(
                f"{user_line()}: {what} of {self.spec}: this process has a part of it only, or nothing. Every process "
                "takes x.full(), or weft.whole(x), which takes modules and dicts, too; of a compiled model save "
                "program.full_state_dict() and program.full_optimizer_state_dict(), or what "
                "weft.release(model, optimizer) gives back"
            )
        return self.locals[0].detach().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A tensor with these values alone, without the rest of the storage."""
        plain = self._here("pickling").detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Any:
        raise UserError(
            f"{user_line()}: copy.copy of {self.spec}: copy.deepcopy and x.clone() copy a global tensor, x.detach() is "
            "another one with its memory"
        )

    def __dlpack__(self, **options: Any) -> Any:
        return self._here("dlpack").clone().__dlpack__(**options)

    def data_ptr(self) -> int:
        return self._here("data_ptr()").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._here("untyped_storage()").untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        if id(self) not in memo:
            copy: Any = type(self)(self.spec, tuple(part.clone() for part in self.locals))
            copy = stored_in(copy, self.shares)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
            if hasattr(self, "keeps_gradient") and copy.requires_grad:
                keep_gradient_with(copy)
        found: GlobalTensor = memo[id(self)]
        return found

    def tolist(self) -> Any:
        return self.detach().full().tolist()  # type: ignore[attr-defined]

    def numpy(self, *, force: bool = False) -> Any:
        """The memory of this process's first rank, to be read: a write would not reach other ranks."""
        found = self._here("numpy()").numpy(force=force)
        found.flags.writeable = False
        return found

    def share_memory_(self) -> Any:
        raise UserError(
            "the parts of a global tensor cannot be moved to shared memory; weft.release(model) gives ordinary tensors"
        )

    def is_pinned(self, device: Any = None) -> bool:
        return all(part.is_pinned() for part in self.locals)

    def pin_memory(self, device: Any = None) -> Any:
        raise UserError("a global tensor cannot be pinned; take x.full().pin_memory()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.numpy()
        return found.astype(dtype or found.dtype, copy=bool(copy))


def keep_gradient_with(parameter: Any) -> None:
    """Bring the gradient of a leaf, and of its deep copies, to its layout once all of it has been added up."""
    before = getattr(parameter, "keeps_gradient", None)
    if before is not None:
        before.remove()
    parameter.keeps_gradient = parameter.register_hook(_Laying(parameter.spec.layout))


@final
class _Laying:
    lays_gradient = True

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __call__(self, gradient: Any) -> Any:
        return gradient.to_global(placement=self._layout.placement, sbp=self._layout.sbp)


def _places(tensor: GlobalTensor) -> list[Any]:
    return [(x.data_ptr(), x.shape, x.stride()) for x in tensor.locals]


def _moved_along(part: Tensor, own: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
    of, copy = own.get(part.untyped_storage().data_ptr(), (None, None))
    if of is None or copy is None:
        return part
    if part.dtype != of.dtype or copy.stride() != of.stride():
        return part.clone()
    offset = part.storage_offset() - of.storage_offset()
    return copy.as_strided(part.size(), part.stride(), offset)


_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_data: Any = Tensor.data


@final
class _ToGlobal(torch.autograd.Function):
    """Boxing. A gradient is right in any layout; it goes back to the splits that the tensor came in."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, layout: Layout) -> GlobalTensor:
        ctx.layout = x.spec.layout
        return GlobalTensor(*_moved(x, layout))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient, source = gradients[0], ctx.layout
        same = gradient.placement == source.placement
        arrived = gradient.sbp if same else broadcast_layout(source.placement).sbp
        sbp = (
            there if isinstance(there, Split) or isinstance(here, Split) else here
            for here, there in zip(arrived, source.sbp, strict=True)
        )
        target = Layout(source.placement, tuple(sbp))
        return GlobalTensor(*_moved(gradient, target)), None


def _moved(x: GlobalTensor, layout: Layout) -> tuple[Spec, Locals]:
    """Spec and locals of `x` in another layout, in the usual order; on its own placement it needs no other world."""
    own = x.spec.mesh
    stays = own.in_process and layout.placement == own.placement
    mesh = own if stays else own.at(layout.placement)
    return change_layout(x.spec, x.locals, layout, mesh, x.shares, None)


@final
class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: GlobalTensor) -> Tensor:
        ctx.spec = x.spec
        return x.locals[0].view_as(x.locals[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        spec = ctx.spec.with_layout(gradient_layout(ctx.spec.layout))
        return GlobalTensor(spec, (gradients[0],))


@final
class _Full(torch.autograd.Function):
    """A Broadcast tensor as a plain one, with which all processes compute the same."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor) -> Tensor:
        ctx.spec = x.spec
        return x.locals[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        spec = contiguous(ctx.spec.mesh, ctx.spec.layout, ctx.spec.shape, ctx.spec.dtype)
        devices = (spec.mesh.device_of(rank) for rank in spec.mesh.ranks)
        copies = tuple(gradients[0].to(device, copy=True).contiguous() for device in devices)
        return GlobalTensor(spec, copies)


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
