"""The table of weft's own ops names just those that have a rule, a kernel or both."""

from __future__ import annotations

from weft.ops import registered_ops, shares_memory
from weft.ops.weft_ops import WEFT_OPS, ops_that
from weft.runtime.kernels.generated import UNIFORM
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.runtime.kernels.own_ops import OVER_STEP_OPS


def test_every_op_of_weft_stands_in_the_table() -> None:
    rules = {name for name in registered_ops() if name.startswith("weft.")}
    kernels = {name for name in (*LOCAL_OPS, *OVER_STEP_OPS) if name.startswith("weft.")}
    assert rules | kernels == WEFT_OPS.keys()
    assert rules - kernels == {UNIFORM, "weft.take"}


def test_ops_over_a_step_are_those_that_keep_what_they_have() -> None:
    assert ops_that("over_step") == OVER_STEP_OPS.keys()


def test_what_shares_memory_launches_nothing() -> None:
    assert all(op.launches == 0 for op in WEFT_OPS.values() if op.shares)
    assert all(shares_memory(name) == op.shares for name, op in WEFT_OPS.items())
