"""Checks of the ops of a trace: random numbers, writes, and dtypes that torch's kernels do not know.

Writes are refused where PyTorch refuses them or leaves their result open: to one place for several elements, and to
memory that the same op reads through another view. If an op writes arguments that it does not return, shapes on
tensors without data cannot be trusted: torch's observers of quantization give their buffers the shape that they need
in their first call. Dtypes are checked because tensors without data pass where the kernels refuse real tensors.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

from weft.capture.fx.locations import location_of
from weft.capture.fx.private import values_made, written_by, written_copy
from weft.capture.fx.refusals import refuse_op
from weft.ops.cost import dtype_name

_EXPANDED = (
    "writes to a tensor of which several elements are at one place in memory, as expand, broadcast_to, unfold and "
    "as_strided make them: PyTorch refuses that, or its result is undefined; clone() the tensor before"
)
_READ = (
    "writes to memory that it reads through another view: PyTorch refuses that, or its result is undefined; "
    "clone() what it reads"
)
_ALIASING = (
    "writes to an argument, or gives a view of one, which in a graph ops of PyTorch alone may do; expected one that "
    "makes new tensors, such as a torch.library.custom_op with mutates_args=()"
)
_RESIZES = (
    "changes the shape of a tensor that it writes when it first runs, from {} to {}; call the model once before "
    "compiling"
)
_RANDOM = (
    "draws random numbers in a way that would differ from layout to layout; use torch.rand, randn, randint, "
    "multinomial, dropout and the like without a generator, or draw the numbers outside and pass them in the batch"
)
_RANDOM_BACKWARD = (
    "runs in the backward pass, of an autograd.Function or a hook, where random numbers have no number of their own; "
    "draw them in the forward and save them for the backward"
)
_WRITTEN = (
    "makes a view at a place that depends on a value, and the view or what it shows is written later; write with "
    "torch.where, index_copy or scatter"
)
# Up to how many elements an op is tried.
_TRIED = 1 << 25


def check_ops(graph: torch.fx.Graph, copies: Sequence[torch.fx.Node] = ()) -> None:
    """Refuse ops of a located trace that no logical graph may hold.

    Args:
        graph: the trace.
        copies: nodes that stand for views and must not be written.

    Raises:
        CaptureError: naming the user's line.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            op, location = node.target, location_of(node)
            if torch.Tag.nondeterministic_seeded in op.tags and _draws(op, node):
                raise refuse_op(op, location, _RANDOM)
            if op is torch.ops.weft.uniform.default and location and location.backward:
                raise refuse_op("for random numbers", location, _RANDOM_BACKWARD)
            reason = _reason_against_write(node)
            if reason is not None:
                raise refuse_op(op, location, reason)
        elif node.op == "call_function" and node.target is not operator.getitem:
            raise refuse_op(
                node.target, location_of(node), "is no ATen op; expected plain tensor code"
            )
    for node in copies:
        if written_copy(graph, node):
            raise refuse_op("narrow", location_of(node), _WRITTEN)


def _draws(op: torch._ops.OpOverload, node: torch.fx.Node) -> bool:
    """True if a random op draws: fused attention is tagged as random, but draws nothing without dropout."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0)


def _reason_against_write(node: torch.fx.Node) -> str | None:
    """The reason why no graph may hold what a node of a trace writes; None if it may, or writes nothing."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.inplace_view in op.tags:
        return None
    every = (*op._schema.arguments, *op._schema.returns)
    if op.namespace not in ("aten", "prims", "weft") and any(each.alias_info for each in every):
        return _ALIASING
    written = [x for x in written_by(op, node.args, node.kwargs) if isinstance(x, torch.fx.Node)]
    others = [x for x in node.all_input_nodes if x not in written] if written else []
    views, read = (views_of(each.meta.get("val") for each in nodes) for nodes in (written, others))
    if any(view.overlaps_itself() for view in views):
        return _EXPANDED
    if any(one.meets(other) for one in views for other in read):
        return _READ
    returned = any(result.alias_info for result in op._schema.returns)
    return None if returned or not op._schema.returns else _tried(op, node, written)


def _tried(op: Any, node: torch.fx.Node, written: list[torch.fx.Node]) -> str | None:
    """The reason to refuse an op that changes the shape of a tensor that it writes, tested on ones.

    The op runs only if it writes a buffer of at most one element, which may be uninitialized until its first call.
    """
    given: dict[torch.fx.Node, Any] = {x: x.meta.get("val") for x in node.all_input_nodes}
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    first = any(given[x].numel() <= 1 for x in written)
    draws = torch.Tag.nondeterministic_seeded in op.tags
    if len(tensors) < len(given) or not first or draws or sum(map(torch.numel, tensors)) > _TRIED:
        return None
    with values_made():
        ones = {x: torch.ones(y.shape, dtype=y.dtype) for x, y in zip(given, tensors, strict=True)}
        try:
            op(*torch.fx.map_arg(node.args, ones.get), **torch.fx.map_arg(node.kwargs, ones.get))
        except Exception:  # such values are not for it
            return None
    for each, before in zip(given, tensors, strict=True):
        if each in written and ones[each].shape != before.shape:
            return _RESIZES.format(list(before.shape), list(ones[each].shape))
    return None


# Dtypes.

# Operands, by their places, that have one dtype.
_ALIKE: dict[str, tuple[int, ...]] = {
    "aten.mm.default": (0, 1),
    "aten.bmm.default": (0, 1),
    "aten.addmm.default": (0, 1, 2),
    "aten.baddbmm.default": (0, 1, 2),
    "aten.convolution.default": (0, 1, 2),
    "aten._cdist_forward.default": (0, 1),
    "aten.grid_sampler_2d.default": (0, 1),
    "aten.binary_cross_entropy.default": (0, 1, 2),
    "aten.index_add.default": (0, 3),
    "aten.index_copy.default": (0, 3),
}
# Input and parameters of a norm have one dtype; those of a 16-bit input may be float32.
_NORMS: dict[str, tuple[int, ...]] = {
    "aten.native_layer_norm.default": (0, 2, 3),
    "aten.native_group_norm.default": (0, 1, 2),
    "aten._native_batch_norm_legit_functional.default": (0, 1, 2),
}
_16_BITS = (torch.bfloat16, torch.float16)
# Numbers of classes, by their place.
_CLASSES: dict[str, int] = {
    "aten.nll_loss_forward.default": 1,
    "aten.nll_loss2d_forward.default": 1,
}
# Targets that are not numbers of classes.
_TARGETS: dict[str, int] = {"aten.binary_cross_entropy_with_logits.default": 1}

# Said by kernels that do not know a dtype.
_UNKNOWN = re.compile(r"not implemented for '|can't be cast to the desired|only support floating")
# Elements of operands and result with which a call is tried at most.
_WHOLE_TRIED = 1 << 24


def check_dtypes(graph: torch.fx.Graph) -> None:
    """Refuse calls of a located trace that torch's kernels refuse for the dtypes of their operands.

    Raises:
        CaptureError: naming the user's line.
    """
    tried: set[tuple[object, ...]] = set()
    for node in graph.nodes:
        if node.op == "call_function":
            _check_operands(node)
            _try_on_whole_numbers(node, tried)


def _check_operands(node: torch.fx.Node) -> None:
    op = str(node.target)
    operands = _dtypes(node, *_ALIKE.get(op, ()), *_NORMS.get(op, ()))
    wanted = {*operands[:1], *([torch.float32] if op in _NORMS and operands[0] in _16_BITS else [])}
    classes = _dtypes(node, *([_CLASSES[op]] if op in _CLASSES else []))
    targets = _dtypes(node, *([_TARGETS[op]] if op in _TARGETS else []))
    if not wanted.issuperset(operands):
        takes, convert = (
            "operands of one dtype",
            "convert one, such as a batch in float64 by x.float()",
        )
    elif any(each not in (torch.int64, torch.uint8) for each in classes):
        takes, convert = "classes in int64", "convert them by y.long()"
    elif any(not each.is_floating_point for each in targets):
        takes, convert = "targets in floating point", "convert them by y.float()"
    else:
        return
    found = ", ".join(dtype_name(each) for each in (*operands, *classes, *targets))
    raise refuse_op(node.target, location_of(node), f"takes {takes}, got {found}; {convert}")


def _try_on_whole_numbers(node: torch.fx.Node, tried: set[tuple[object, ...]]) -> None:
    """Refuse a call on integer tensors only if its kernel does not support integers.

    Most kernels check dtypes only when called, so each kernel is tried once for its dtypes.
    """
    op: Any = node.target
    values: list[Any] = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
    given = [each for each in values[:-1] if isinstance(each, torch.Tensor)]
    values = [each for each in values if isinstance(each, torch.Tensor)]
    key = (op, *(each.dtype for each in values))
    # A kernel of the user's may do anything. Products take longer than their elements say, and have whole numbers.
    if key in tried or not given or getattr(op, "namespace", "") != "aten" or str(op) in _ALIKE:
        return
    broken = any(each.is_floating_point() or each.is_complex() for each in given)
    effects = op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags
    if broken or effects or sum(map(torch.numel, values)) > _WHOLE_TRIED:
        return
    tried.add(key)
    ones = {
        x: torch.ones(x.meta["val"].shape, dtype=x.meta["val"].dtype) for x in node.all_input_nodes
    }
    try:
        with torch.no_grad():
            op(*torch.fx.map_arg(node.args, ones.get), **torch.fx.map_arg(node.kwargs, ones.get))
    except Exception as error:
        if _UNKNOWN.search(str(error)):
            found = ", ".join(dict.fromkeys(dtype_name(each.dtype) for each in given))
            text = f"needs floating-point numbers, got {found}; convert them, such as by x.float()"
            raise refuse_op(op, location_of(node), text) from None


def _dtypes(node: torch.fx.Node, *places: int) -> list[torch.dtype]:
    operands = [node.args[place] for place in places if place < len(node.args)]
    return [each.meta["val"].dtype for each in operands if isinstance(each, torch.fx.Node)]


# The bytes that views show of a memory: whether some of them are the same.

# Up to how many bytes two views are compared one by one.
_MANY = 1 << 20
_Dims: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True)
class View:
    """The bytes of a tensor in its memory: where they begin, strides and sizes in order, the largest stride first."""

    memory: torch.UntypedStorage
    start: int
    order: _Dims
    dims: _Dims

    @property
    def end(self) -> int:
        """The last byte."""
        return self.start + _extent(self.dims)

    def overlaps_itself(self) -> bool:
        """True if several elements may be at one place."""
        return any(
            stride <= _extent(self.dims[at + 1 :]) for at, (stride, _) in enumerate(self.dims)
        )

    def meets(self, other: View) -> bool:
        """True if another view shows some of the bytes, but not the same ones in the same order."""
        same = self.start == other.start and self.order == other.order
        return self.memory is other.memory and not same and self.overlaps(other)

    def overlaps(self, other: View) -> bool:
        """True if a view of the same memory shows some of the bytes."""
        if self.start > other.end or other.start > self.end:
            return False
        for one, two in ((self, other), (other, self)):
            dense = _count(one.dims) == _extent(one.dims) + 1
            if dense and (one.start <= two.start or two.end <= one.end):
                return True
        return _meet(self.start - other.start, self.dims, other.dims)


def views_of(values: Iterable[Any]) -> list[View]:
    """The views that dense tensors among some values are, empty ones left out."""
    dense = (x for x in values if isinstance(x, torch.Tensor) and x.layout == torch.strided)
    views = []
    for x in dense:
        if not x.numel():
            continue
        width = x.element_size()
        dims = zip(x.stride(), x.shape, strict=True)
        every = (*((int(stride) * width, int(size)) for stride, size in dims), (1, width))
        kept = tuple(each for each in every if each[1] > 1)
        start = int(x.storage_offset()) * width
        views.append(View(x.untyped_storage(), start, kept, tuple(sorted(kept, reverse=True))))
    return views


def _extent(dims: _Dims) -> int:
    return sum(stride * (size - 1) for stride, size in dims)


def _count(dims: _Dims) -> int:
    return math.prod(size for _, size in dims)


def _meet(apart: int, one: _Dims, two: _Dims) -> bool:
    """True if views that begin so far apart have a byte in common."""
    while one and two and one[0] == two[0]:
        if abs(apart) + max(_extent(one[1:]), _extent(two[1:])) >= one[0][0]:
            break
        one, two = one[1:], two[1:]  # bytes of other rows are other ones
    if max(_count(one), _count(two)) > _MANY:
        return True
    return not _places(apart, one).isdisjoint(_places(0, two))


def _places(start: int, dims: _Dims) -> set[int]:
    found = {start}
    for stride, size in dims:
        found = {place + stride * i for place in found for i in range(size)}
    return found
