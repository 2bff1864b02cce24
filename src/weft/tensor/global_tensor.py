"""GlobalTensor: one whole tensor that lies on the ranks of a placement, computed with eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.boxing import gradient_layout
from weft.errors import LayoutError, UserError
from weft.layout import SBP, Layout, Placement, Split, broadcast_layout
from weft.tensor.boxing import box
from weft.tensor.chain import Locals
from weft.tensor.dispatch import dispatch
from weft.tensor.divergence import user_line
from weft.tensor.mesh import mesh_of
from weft.tensor.show import show
from weft.tensor.spec import Spec, contiguous, layout_for


class GlobalTensor(Tensor):
    """A tensor of the whole shape whose data lies on the ranks of a placement, as its layout says.

    It computes like any tensor: ops choose how their results lie by the same rules as
    `weft.compile`, operands that lie otherwise are boxed. Made by `weft.tensor`, `weft.randn`,
    `weft.from_local`, …

    Attributes:
        spec: shape, dtype and layout.
        locals: the local tensors of this process's ranks, in the placement's order.
    """

    spec: Spec
    locals: Locals

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
        """The grid of ranks that it lies on."""
        return self.spec.layout.placement

    @property
    def sbp(self) -> tuple[SBP, ...]:
        """One SBP for each axis of the placement."""
        return self.spec.layout.sbp

    def to_global(
        self, *, placement: Placement | None = None, sbp: SBP | Sequence[SBP] | None = None
    ) -> GlobalTensor:
        """The same tensor in another layout; differentiable.

        Args:
            placement: by default the same.
            sbp: one SBP, or one for each axis; by default the same.

        Raises:
            LayoutError: when the layout does not fit the tensor or the world.
        """
        there = placement or self.placement
        layout = layout_for(there, self.sbp if sbp is None else sbp, self.shape, "to_global")
        if layout == self.spec.layout:
            return self
        moved: GlobalTensor = _ToGlobal.apply(self, layout)  # type: ignore[no-untyped-call]
        return moved

    def to_local(self) -> Tensor:
        """The local tensor of this process's rank, sharing memory.

        Differentiable: each rank's gradient is that of what it computes itself, so that gradients
        of what is Broadcast add up over the ranks.

        Raises:
            UserError: when this process has several ranks of the placement, or none.
        """
        ranks = self.spec.mesh.ranks
        if len(ranks) != 1:
            raise UserError(
                f"to_local: this process has the ranks {list(ranks)} of {self.placement}; use shards(), which gives "
                "{rank: local tensor}"
            )
        part: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
        return part

    def shards(self) -> dict[int, Tensor]:
        """The local tensor of every rank of this process, sharing memory, without gradients."""
        return dict(zip(self.spec.mesh.ranks, self.locals, strict=True))

    def full(self) -> Tensor:
        """A plain copy of the whole tensor; differentiable. Every process of the placement must call it.

        Raises:
            UserError: when this process has no rank of the placement.
        """
        whole = self.to_global(sbp=broadcast_layout(self.placement).sbp)
        if not whole.locals:
            raise UserError(f"full: this process has no rank of {self.placement}")
        plain: Tensor = _Full.apply(whole)  # type: ignore[no-untyped-call]
        return plain

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, GlobalTensor):
            raise LayoutError(
                f"{user_line()}: the data of {self.spec} can be replaced by a global tensor only, found a plain one; "
                "make it global with weft.tensor or weft.from_local"
            )
        self.become(value)

    def become(self, value: GlobalTensor) -> None:
        """Take over shape, layout and memory of another global tensor."""
        _data.__set__(self, value)
        self.spec, self.locals = value.spec, value.locals

    def __format__(self, form: str) -> str:
        return format(self.item() if form and not self.dim() else str(self), form)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return show(self.spec, self.shards(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "a global tensor cannot be pickled: each process holds only its part. Save x.full(), or x.to_local() on "
            "each rank, and make it global again with weft.tensor or weft.from_local"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        if id(self) not in memo:
            copy: Any = type(self)(self.spec, tuple(part.clone() for part in self.locals))
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
            if hasattr(self, "keeps_gradient"):
                keep_gradient_with(copy)
        found: GlobalTensor = memo[id(self)]
        return found

    def tolist(self) -> Any:
        return self.detach().full().tolist()  # type: ignore[attr-defined]

    def numpy(self, *, force: bool = False) -> Any:
        raise UserError("a global tensor is no numpy array; take x.full().numpy()")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()


def keep_gradient_with(parameter: Any) -> None:
    """Bring the gradient of a leaf, and of its deep copies, to its layout once all of it has been added up."""
    sbp = parameter.sbp
    parameter.keeps_gradient = True
    parameter.register_hook(lambda gradient: gradient.to_global(sbp=sbp))


_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_data: Any = Tensor.data


class _ToGlobal(torch.autograd.Function):
    """Boxing. A gradient is right in any layout; it goes back to the splits that the tensor came in."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, layout: Layout) -> GlobalTensor:
        ctx.layout = x.spec.layout
        return GlobalTensor(*box(x.spec, x.locals, layout, mesh_of(layout.placement)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _boxed_back(gradients[0], ctx.layout), None


def _boxed_back(gradient: GlobalTensor, source: Layout) -> GlobalTensor:
    """A gradient brought to the placement and the splits of `source`; what need not be split stays as it is."""
    same = gradient.placement == source.placement
    arrived = gradient.sbp if same else broadcast_layout(source.placement).sbp
    sbp = (
        there if isinstance(there, Split) or isinstance(here, Split) else here
        for here, there in zip(arrived, source.sbp, strict=True)
    )
    target = Layout(source.placement, tuple(sbp))
    return GlobalTensor(*box(gradient.spec, gradient.locals, target, mesh_of(target.placement)))


class _ToLocal(torch.autograd.Function):
    """The only local tensor as a plain one."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor) -> Tensor:
        ctx.spec = x.spec
        return x.locals[0].view_as(x.locals[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        spec = ctx.spec.with_layout(gradient_layout(ctx.spec.layout))
        return GlobalTensor(spec, (gradients[0],))


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
