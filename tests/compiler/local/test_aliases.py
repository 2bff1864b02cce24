"""Every op whose result may share memory with its operand is known as a view: its readers hold back updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.errors import InternalError
from weft.ops import registered_ops, shares_memory
from weft.runtime.torch_ops import torch_op


def aliases(name: str) -> bool:
    try:
        op = torch_op(name)
    except InternalError:  # this torch does not have it
        return False
    return any(result.alias_info is not None for result in op._schema.returns)


def test_every_aliasing_op_with_a_rule_is_a_view() -> None:
    names = {name for name in registered_ops() if name.startswith("aten.") and aliases(name)}
    assert len(names) > 20
    assert [name for name in names if not shares_memory(name)] == []


def results(name: str, x: Tensor) -> list[Any]:
    """What an op makes of `x`, called with the first arguments that it takes."""
    for arguments in ((x,), (x, 2), (x, [2, 2]), (x, 0), (x, 0, 1), (x, [4, 4]), ([x, x],), (x, x)):
        try:
            made = torch_op(name)(*arguments)
        except (InternalError, RuntimeError, IndexError):  # not its arguments
            continue
        return list(made) if isinstance(made, list | tuple) else [made]
    return []


def test_no_other_op_returns_memory_that_it_was_given() -> None:
    """Some say nothing of it in their schema, such as `unsafe_split`."""
    x = torch.randn(4, 4)
    names = [name for name in registered_ops() if name.startswith("aten.")]
    found = {
        name
        for name in names
        for made in results(name, x)
        if isinstance(made, Tensor) and made.numel() and _is_of(made, x)
    }
    assert len(found) > 15
    assert [name for name in found if not shares_memory(name)] == []


def _is_of(made: Tensor, x: Tensor) -> bool:
    return made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
