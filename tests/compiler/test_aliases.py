"""Every op whose result may share memory with its operand is known as a view: its readers hold back updates."""

from __future__ import annotations

from weft.compiler.aliases import VIEW_OPS
from weft.errors import InternalError
from weft.ops import registered_ops
from weft.runtime.local_ops import VIEW_OPS as LOCAL_VIEWS
from weft.runtime.torch_ops import torch_op


def shares_memory(name: str) -> bool:
    try:
        op = torch_op(name)
    except InternalError:  # this torch does not have it
        return False
    return any(result.alias_info is not None for result in op._schema.returns)


def test_every_aliasing_op_with_a_rule_is_a_view() -> None:
    names = {name for name in registered_ops() if name.startswith("aten.") and shares_memory(name)}
    assert len(names) > 20
    assert names - VIEW_OPS == set()


def test_the_runtimes_own_views_are_views() -> None:
    assert set(LOCAL_VIEWS) <= VIEW_OPS
