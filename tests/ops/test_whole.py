"""Ops without a rule: which of them run whole, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weft.errors import RuleError
from weft.layout import Broadcast
from weft.ops import OpCall, Operand, TensorSpec, has_rule, localize, runs_whole, signatures

UNSAFE = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}
# The shape depends on arguments that are numbers; with tensors of lengths, capture refuses it.
SHAPED_BY_NUMBERS = ("aten._ctc_loss.default", "aten._ctc_loss.Tensor")


def overloads() -> Iterator[torch._ops.OpOverload]:
    """All ATen overloads that make tensors."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        makes = any("Tensor" in str(result.type) for result in schema.returns)
        if namespace in ("aten", "prims") and makes and schema.name != "aten::popitem":
            packet = getattr(getattr(torch.ops, namespace), name, None)
            found = getattr(packet, schema.overload_name or "default", None)
            if isinstance(found, torch._ops.OpOverload):
                yield found


def call(op: str) -> OpCall:
    spec = TensorSpec((4, 4), "float32")
    return OpCall(op, (Operand(0),), (), (spec,), (spec,))


def test_what_runs_whole_is_a_function() -> None:
    # Inductor has ops for itself, once anything has imported it.
    every = [op for op in overloads() if "inductor" not in str(op)]
    assert len(every) > 2000
    unsafe = [op for op in every if op._schema.is_mutable or UNSAFE & set(op.tags)]
    wrong = {str(op) for op in unsafe if runs_whole(str(op))}
    assert wrong - set(SHAPED_BY_NUMBERS) == set()


def test_plain_functions_run_whole() -> None:
    op = "aten.linalg_eigvals.default"
    assert not has_rule(op)
    (only,) = signatures(call(op), 2)
    assert (*only.operands, *only.results) == (Broadcast(), Broadcast())
    assert localize(call(op), only, 2, 1) == call(op)


@pytest.mark.parametrize(
    "op",
    [
        "aten.rand_like.default",
        "aten.as_strided.default",
        "aten.add_.Tensor",
        "aten.mm.out",
        "aten.nonzero.default",
        "mylib.unknown.default",
    ],
)
def test_others_are_refused(op: str) -> None:
    with pytest.raises(RuleError, match="has no sharding rule"):
        signatures(call(op), 2)
