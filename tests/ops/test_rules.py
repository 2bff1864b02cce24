"""Every rule, run on small shards against the whole result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ops.draw import GENERATOR, aten, b, f, i
from ops.rule_samples import FAMILIES, NOT_RUN
from ops.samples_tensor import pointwise_backward, products, views
from tools.oracles.rules import TorchCall, check_call, describe, draw_shards
from weft.ops import localize, registered_ops, signatures
from weft.runtime.torch_ops import to_torch

Family = Callable[[], Iterator[TorchCall]]
by_exact_family = pytest.mark.parametrize("family", [products, views, pointwise_backward])
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Whatever ran before, a family draws the same numbers."""
    GENERATOR.manual_seed(7)


@pytest.mark.parametrize("parts", [2, 3, 4])
@by_family
def test_declared_signatures_are_right(family: Family, parts: int) -> None:
    reports = [check_call(sample, parts) for sample in family()]
    assert reports
    assert [line for report in reports for line in report.mismatches] == []


@by_family
def test_local_calls_can_be_split_again(family: Family) -> None:
    """A grid of two axes applies the rules to the result of localizing."""
    wrong: list[str] = []
    for sample in family():
        whole, tensors, _ = describe(sample)
        for signature in signatures(whole, 2)[1:]:
            local = localize(whole, signature, 2, 1)
            shards = draw_shards(tensors, signature.operands, 2, torch.Generator())[1]
            args = to_torch(local.args, shards)
            kwargs = tuple((name, to_torch(value, shards)) for name, value in local.kwargs)
            wrong += check_call(TorchCall(local.op, args, kwargs), 2).mismatches
    assert wrong == []


@by_exact_family
def test_no_legal_signature_is_missing(family: Family) -> None:
    assert [one for sample in family() for one in check_call(sample, 2, search=True).missing] == []


def test_every_op_has_a_sample() -> None:
    sampled = {sample.op for family in FAMILIES for sample in family()}
    ours = [op for op in registered_ops() if not op.startswith("test.")]
    assert [op for op in ours if op not in sampled and op not in NOT_RUN] == []
    assert [op for op in NOT_RUN if op in sampled or op not in ours] == []


def test_most_samples_can_be_split() -> None:
    """A rule that admits nothing but Broadcast would pass every check."""
    whole_only = {"scalar_tensor", "eye", "mean", "std", "var", "norm"}
    whole_only |= {"argmax", "argmin", "median", "nanmedian"}
    whole_only |= {"clip_factor", "next_scale", "offload", "load"}
    split = {s.op for family in FAMILIES for s in family() if len(check_call(s, 2).checked) > 1}
    sampled = {sample.op for family in FAMILIES for sample in family()}
    assert {op.split(".")[1] for op in sampled - split} <= whole_only


@by_family
def test_ranks_may_have_empty_shards(family: Family) -> None:
    """More ranks than most dimensions have elements."""
    reports = [check_call(sample, 7, empty=True) for sample in family()]
    assert [line for report in reports for line in report.mismatches] == []


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (aten("index_put", f(8, 4), (b(8, 4),), f(), False), "S(1), S(1), B -> S(1)"),
        (aten("index_put", f(8, 4), (b(8),), f(), False), "S(1), B, B -> S(1)"),
        (
            aten("scatter_reduce.two", f(5, 6), 1, i(6, 5, 6), f(5, 6), "sum"),
            "P(sum), S(1), S(1) -> P(sum)",
        ),
        (aten("_linalg_solve_ex", f(3, 3), f(3, 4)), "B, S(1) -> S(1), B, B, B"),
        (aten("_linalg_solve_ex", f(5, 3, 3), f(5, 3, 4)), "B, S(2) -> S(2), B, B, B"),
    ],
)
def test_signatures_that_matter_for_speed(sample: TorchCall, expected: str) -> None:
    report = check_call(sample, 2)
    assert expected in map(str, report.checked)
    assert report.mismatches == ()


def test_a_right_side_whose_shard_looks_like_vectors_stays_whole() -> None:
    """Of 6 matrices of 3 x 3 and one right side of 3 x 3, half are 3 matrices, and the right side 3 vectors."""
    assert len(check_call(aten("_linalg_solve_ex", f(6, 3, 3), f(3, 3)), 2).checked) == 1
