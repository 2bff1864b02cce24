"""Samples of the OpInfo database as functions of plain contiguous tensors, with what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import active_fake_mode
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

DTYPE = torch.float32


@dataclass(frozen=True, eq=False)
class Case:
    """One sample of one op.

    Attributes:
        name: of the op.
        tensors: the tensors among the arguments, contiguous; `wanted[i]` says whether the gradient of number i is
            compared.
        run: from tensors like these to the op's results.
        key: tells samples apart by shapes and arguments.
    """

    name: str
    tensors: tuple[torch.Tensor, ...]
    wanted: tuple[bool, ...]
    run: Callable[[Sequence[torch.Tensor]], Any]
    key: str

    def describe(self) -> str:
        """The sample in one line."""
        return f"{self.name}({self.key})"


def opinfos(dtypes: Sequence[torch.dtype] = (DTYPE,)) -> list[Any]:
    """The OpInfos that take one of these dtypes on the CPU."""
    return [info for info in op_db if not info.supported_dtypes("cpu").isdisjoint(dtypes)]


def full_name(info: Any) -> str:
    """Name and variant of an OpInfo, such as "std.unbiased"."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def cases(
    info: Any, limit: int, dtype: torch.dtype = DTYPE, *, in_place: bool = False
) -> Iterator[Case]:
    """Up to `limit` samples that differ: first those of new shapes, then those of other arguments.

    Args:
        info: an OpInfo.
        limit: how many.
        dtype: of the samples.
        in_place: whether it is the method that writes its first argument; ops without one have no samples.
    """
    torch.manual_seed(0)
    function = info.inplace_variant if in_place else info.op
    if function is None:
        return
    grad = bool(info.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
    samples = info.sample_inputs("cpu", dtype, requires_grad=grad)
    found = [_case(info, function, sample) for sample in samples]
    by_shapes: dict[str, Case] = {}
    by_key: dict[str, Case] = {}
    for case in found:
        shapes = str([tuple(x.shape) for x in case.tensors])
        if shapes not in by_shapes:
            by_shapes[shapes] = case
        elif case.key not in by_key:
            by_key[case.key] = case
    spread = _spread(list(by_shapes.values()), limit)
    rest = (case for case in by_shapes.values() if case not in spread)
    yield from islice(chain(spread, by_key.values(), rest), limit)


def _spread(items: list[Case], limit: int) -> list[Case]:
    """At most `limit` of the items, evenly taken, the first among them; half of the places stay for others."""
    room = max((limit + 1) // 2, 1)
    if len(items) <= room:
        return items
    return [items[i * len(items) // room] for i in range(room)]


def _case(info: Any, function: Callable[..., Any], sample: Any) -> Case:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    wanted = tuple(bool(leaf.requires_grad) for leaf in tensors)
    finish = sample.output_process_fn_grad

    def run(given: Sequence[torch.Tensor]) -> Any:
        waiting = iter(given)
        parts = [next(waiting) if isinstance(x, torch.Tensor) else x for x in leaves]
        first, args, kwargs = pytree.tree_unflatten(parts, spec)
        if active_fake_mode() is None:
            return finish(function(first, *args, **kwargs))
        with patch.object(common_methods_invocations, "wrapper_set_seed", _unseeded):
            return finish(function(first, *args, **kwargs))

    plain = tuple(_plain(tensor) for tensor in tensors)
    return Case(full_name(info), plain, wanted, run, _key(leaves, spec))


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The op as it is: a step that seeds torch's generator before it draws is refused."""
    return op(*args, **kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy without history; sparse ones stay, to be refused."""
    if tensor.layout != torch.strided:
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _key(leaves: list[Any], spec: Any) -> str:
    shown = [
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, torch.Tensor)
        else repr(x)
        for x in leaves
    ]
    return ", ".join(shown)[:160]
