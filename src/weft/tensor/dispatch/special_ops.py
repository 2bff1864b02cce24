"""Ops that do not run by their rule: decomposed as in the compiled path, or written in place.

Kernels below dispatch get no lazy conjugates and negatives: torch calls `__torch_dispatch__` with all
dispatch keys above Python's excluded, those that resolve lazy conjugates and negatives among them. A kernel
made of other ops, such as `linalg_pinv`, would then ignore its own lazy bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from weft.capture.fx.private import DispatchMode, stands_for
from weft.capture.ops.decompositions import decompositions, fallback
from weft.capture.optimizers import fused
from weft.errors import UserError, wrong
from weft.layout import Layout, broadcast_layout
from weft.ops import has_rule
from weft.runtime.random import uniform
from weft.runtime.world.world import World
from weft.tensor.boxing import box
from weft.tensor.dispatch.interleaved import STRIDED, by_strides, note_copies, stored_in
from weft.tensor.dispatch.operands import (
    all_global,
    common_mesh,
    of_all,
    op_name,
    run_on_whole_copies,
    tensors_in,
)
from weft.tensor.dispatch.writes import fused_update, in_place, other_memory, resized
from weft.tensor.divergence import note_made, user_line
from weft.tensor.spec import Mesh, contiguous, without_partials

aten = torch.ops.aten

# Called with the class of global tensors, the op and its arguments; NotImplemented sends the op to
# its rule.
Way: TypeAlias = Callable[[type, Any, tuple[Any, ...], dict[str, Any]], Any]

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
_PHYSICAL: dict[Any, Callable[[Tensor], Tensor]] = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
# Namespaces of torch's own functions that are no ATen ops.
_OF_TORCH = ("torch_nn",)
_MASKS = (torch.bool, torch.uint8)
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
)
_SETTING = tuple(getattr(aten.set_, name) for name in aten.set_.overloads())  # type: ignore[no-untyped-call]
# Of single ops.
_SPECIAL: dict[Any, Way] = {
    **dict.fromkeys(STRIDED, by_strides),
    **dict.fromkeys(_SETTING, other_memory),
    aten.resize_.default: resized,
    aten.resize_as_.default: resized,
}


def special_handling(op: Any) -> Way | None:
    """The way to run an op differently from by its rule; None when its rule, or none, is all there is."""
    name = op._schema.name.partition("::")[2]
    if op in _SPECIAL:
        return _SPECIAL[op]
    if name.startswith("_foreach_"):
        return lambda kind, op, args, kwargs: op._op_dk(_COMPOSITE, *args, **kwargs)
    if fused.updates(op):
        return fused_update
    if not _OF_VALUES.isdisjoint(op.tags):
        return in_place if op._schema.is_mutable else run_on_whole_copies
    if op in _table():
        return _drawn if torch.Tag.nondeterministic_seeded in op.tags else _taken_apart
    if op._schema.is_mutable:
        return in_place
    return None if has_rule(op_name(op)) else _without_rule


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    """The functions for ops that the compiled path takes apart; but the seed of a backward is a global tensor here."""
    table = dict(decompositions())
    table.pop(aten.ones_like.default)
    return table


def _taken_apart(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _global(kind, op, args, kwargs, _table()[op](*args, **kwargs))


def _global(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Any:
    """Results of an op that was decomposed: what it made of no values is plain, and becomes global."""
    if isinstance(made, kind):
        return made
    return all_global(kind, common_mesh(kind, op, tensors_in(kind, args, kwargs)), made)


def _drawn(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers get the layout of the first operand."""
    tensors = tensors_in(kind, args, kwargs)
    mesh = common_mesh(kind, op, tensors)
    first = next(tensor for tensor in tensors if isinstance(tensor, kind))
    with Drawing(kind, mesh, first.spec.layout, first.spec.shape):
        return all_global(kind, mesh, _table()[op](*args, **kwargs))


def _without_rule(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By torch's own definition in terms of other ops, where it has one."""
    if has_rule(op_name(op)):
        return NotImplemented  # declared since
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return _global(kind, op, args, kwargs, op.decompose(*args, **kwargs))
    function = fallback().get(op)
    if function is None:
        return (
            run_on_whole_copies(kind, op, args, kwargs)
            if op.namespace in _OF_TORCH
            else NotImplemented
        )
    return _global(kind, op, args, kwargs, function(*args, **kwargs))


@stands_for(_SPECIAL, *_PHYSICAL)
def _physical(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lazy conjugates and negatives are computed at once: below dispatch nothing sees that they are lazy."""
    (tensor,) = args
    made = _PHYSICAL[op](tensor)
    note_copies(tensor, [made], op, elements=False)
    return made


@stands_for(_SPECIAL, aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _same(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    made = kind(tensor.spec, tensor.locals, tensor.storage_offset())
    if hasattr(tensor, "origin"):
        made.origin = tensor.origin
    return stored_in(made, tensor.shares)


@stands_for(_SPECIAL, *_INDEXING)
def _masks_as_positions(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Boolean indices as the positions where they are true; others are left to the rule."""
    x, indices, *rest = args
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return NotImplemented
    found: list[Any] = []
    for index in indices:
        mask = index is not None and index.dtype in _MASKS
        found += aten.nonzero.default(index).unbind(1) if mask else [index]
    return op(x, found, *rest, **kwargs)


@stands_for(_SPECIAL, aten._linalg_check_errors.default)
def _checked(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    run_on_whole_copies(kind, op, args, kwargs)


@stands_for(_SPECIAL, aten._local_scalar_dense.default)
def _item(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    spec = tensor.spec
    mesh = of_all(spec.mesh)
    target = broadcast_layout(mesh.placement)
    _, own = box(spec, tensor.locals, target, mesh, implicit="item()")
    if not own:
        raise UserError(
            f"{user_line()}: this process has no rank of {spec.layout.placement}; read values on ranks of the "
            "placement only, or bring the tensor to one that has this rank: x.to_global(placement=…, sbp=…)"
        )
    return own[0].item()


@stands_for(_SPECIAL, aten.equal.default)
def _equal(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = args
    return a.shape == b.shape and bool((a == b).all())


@stands_for(_SPECIAL, aten._fused_sdp_choice.default)
def _attention_kernel(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With dropout the plain way, whose mask is drawn by global position; else as torch chooses for whole tensors."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("dropout_p", 0.0) > 0:
        return torch.nn.attention.SDPBackend.MATH.value
    meta = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, Tensor)
        else value
        for name, value in given.items()
    }
    return op(**meta)


_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_CONJUGATE, _NEGATIVE = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative


def note_views() -> None:
    """Until this call of `__torch_dispatch__` returns, let torch note what its ops take views of."""
    _exclude(torch._C.DispatchKey.ADInplaceOrView, False)


def honour_lazy_bits() -> None:
    """Until this call of `__torch_dispatch__` returns, let kernels see which of their values are lazy."""
    _exclude(_CONJUGATE, False)
    _exclude(_NEGATIVE, False)


# Random ops on global tensors: the same numbers in every layout, on any number of ranks.
#
# Every draw takes the next number of a counter that runs alike on all ranks, and draws by global
# position (`weft.runtime.random`).


@final
class _Stream:
    def __init__(self) -> None:
        self.given: int | None = None
        self.seed: int | None = None
        self.count = 0

    def next(self, world: World) -> tuple[int, int]:
        """The seed and the number of the next draw."""
        seed = torch.initial_seed() if self.given is None else self.given
        if seed != self.seed:
            if world.several:
                world.check_process()
                world.calls.enter("the first draw from a seed of global tensors")
                texts = dict.fromkeys(world.ranks, str(seed))
                world.check_same(
                    texts, "the seed of global tensors (torch.manual_seed, weft.manual_seed)"
                )
            self.seed, self.count = seed, 0
        self.count += 1
        return seed, self.count - 1


_stream = _Stream()


def manual_seed(seed: int | None) -> None:
    """Seed the random ops on global tensors; call it with the same seed on every rank.

    Each call restarts the numbers. With None, or without a call, they use
    torch's seed, and restart when `torch.manual_seed` sets another seed; with the same seed they continue. The random
    numbers of a compiled step depend only on the `seed` of `weft.compile`.

    Raises:
        UserError: the seed is not a whole number.
    """
    if seed is not None and type(seed) is not int:
        raise wrong("weft.manual_seed: seed", "a whole number or None", seed)
    _stream.given, _stream.seed = seed, None


@final
class Drawing(DispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, `weft.uniform` makes global tensors."""

    def __init__(self, kind: Any, mesh: Mesh, layout: Layout, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._kind = kind
        self._mesh = mesh
        self._layout = without_partials(layout)
        self._shape = tuple(shape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.weft.uniform.default:
            return func(*args, **(kwargs or {}))
        size = tuple(args[0])
        layout = self._layout
        if size != self._shape:
            layout = broadcast_layout(self._mesh.placement)
        mesh, dtype = self._mesh, kwargs["dtype"]
        seed, salt = _stream.next(mesh.world)
        note_made(mesh, "weft.uniform", seed, salt, size)
        parts = []
        for rank in mesh.ranks:
            ranges = layout.local_ranges(size, rank)
            offset, length = [first for first, _ in ranges], [count for _, count in ranges]
            device = mesh.device_of(rank)
            parts.append(uniform(seed, 0, size, offset, length, salt, dtype=dtype, device=device))
        return self._kind(contiguous(mesh, layout, size, dtype), tuple(parts))
