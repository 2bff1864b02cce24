"""Every op's kernel takes what its formula says: samples run whole and in shards, with every tensor counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ops.draw import GENERATOR
from ops.rule_samples import FAMILIES
from tools.oracles.rules import TorchCall, describe, draw_shards
from weft.ops import OpCall, localize, signatures
from weft.ops.cost import tensor_bytes
from weft.ops.kernel_memory import TAKING, beside, padding, slice_copies
from weft.ops.rules.layers import workspace_bytes
from weft.runtime.kernels import layer_ops as recurrent
from weft.runtime.kernels.generated import local_function
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.runtime.random import uniform
from weft.runtime.recording import MemoryMeter
from weft.runtime.torch_ops import to_torch

Family = Callable[[], Iterator[TorchCall]]
# Torch takes these apart where they run; captured steps hold their parts.
TAKEN_APART = frozenset(
    f"aten.{name}"
    for name in ("_fused_rms_norm.default", "argsort.default", "isfinite.default")
    + ("where.Scalar", "where.ScalarOther", "where.ScalarSelf")
)
# Bounds: how rows lie the step's data say, and what operands are laid anew depends on strides.
BOUNDS = frozenset(
    f"weft.{name}" for name in ("expert_mm", "expert_gradient", "dispatch", "combine", "routes")
) | {"aten.matmul.default"}


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    GENERATOR.manual_seed(7)


def taken(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """The most bytes that a call takes at a time, and those that it leaves."""
    meter = MemoryMeter()
    for given in tree_leaves((args, kwargs)):
        if isinstance(given, Tensor):
            meter.see(given, "batch")
    start = len(meter.events)
    with meter.watching("activations"):
        found = function(*args, **kwargs)
    now = most = 0
    for _, size in meter.events[start:]:
        now += size
        most = max(most, now)
    del found
    return most, now


def planned(call: OpCall) -> tuple[int, int]:
    """The same, as plans foresee it for a call that makes memory of its own."""
    left = sum(tensor_bytes(spec) for spec in call.results if spec) + sum(padding(call))
    return left + beside(call), left


def calls_of(family: Family) -> Iterator[tuple[OpCall, TorchCall]]:
    """The samples of a family, whole and as a rank of two runs them; without those that run nowhere."""
    for sample in family():
        if not sample.op.startswith("aten.") and sample.op not in LOCAL_OPS:
            continue
        whole, tensors, _ = describe(sample)
        yield whole, sample
        for signature in signatures(whole, 2)[1:4]:
            local = localize(whole, signature, 2, 1)
            shards = draw_shards(tensors, signature.operands, 2, torch.Generator())[1]
            kwargs = tuple((name, to_torch(value, shards)) for name, value in local.kwargs)
            shard = TorchCall(local.op, to_torch(local.args, shards), kwargs)
            yield describe(shard)[0], shard


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_no_kernel_takes_more(family: Family) -> None:
    wrong = []
    for call, sample in calls_of(family):
        most, left = taken(local_function(call.op), sample.args, dict(sample.kwargs))
        foreseen = planned(call)
        if call.op not in TAKEN_APART and (most > foreseen[0] or left > foreseen[1]):
            wrong.append(f"{call.op} {call.operands}: {most} and {left}, planned {foreseen}")
    assert wrong == []


def test_formulas_are_not_far_above() -> None:
    """Of each op, one sample at least takes most of what is foreseen."""
    nearest: dict[str, float] = {}
    for family in FAMILIES:
        for call, sample in calls_of(family):
            if call.op in TAKING - BOUNDS and beside(call) > 0:
                most, _ = taken(local_function(call.op), sample.args, dict(sample.kwargs))
                share = (most + 64) / planned(call)[0]
                nearest[call.op] = max(nearest.get(call.op, 0.0), share)
    assert {op: share for op, share in nearest.items() if share < 0.7} == {}
    assert len(nearest) > 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "offset", "length"),
    [
        ((300, 40), (20, 0), (200, 40)),
        ((30, 40), (3, 8), (20, 16)),
        ((700, 400), (0, 0), (700, 400)),
    ],
)
def test_random_numbers(
    dtype: torch.dtype, size: tuple[int, ...], offset: tuple[int, ...], length: tuple[int, ...]
) -> None:
    made = describe(TorchCall("aten.empty.memory_format", (list(length),), (("dtype", dtype),)))[0]
    call = OpCall("weft.uniform", (size, offset, length, 1), (), (), made.results)
    most, _ = taken(lambda: uniform(0, 0, size, offset, length, 1, dtype=dtype), (), {})
    assert 0.8 * planned(call)[0] < most <= planned(call)[0]


@pytest.mark.skipif(
    not recurrent._has_kernel(torch.zeros(1))
    or "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="the workspace's size is known for AVX-512",
)
@pytest.mark.parametrize("sizes", [(6, 3, 16, 16), (9, 12, 24, 24), (20, 7, 300, 65), (1, 1, 8, 8)])
def test_the_workspace_of_an_lstm_is_known_to_the_byte(sizes: tuple[int, int, int, int]) -> None:
    steps, batch, inputs, hidden = sizes
    x, state = torch.zeros(steps, batch, inputs), torch.zeros(batch, hidden)
    weights = torch.zeros(4 * hidden, inputs), torch.zeros(4 * hidden, hidden)
    saved = recurrent.lstm(x, *weights, None, None, state, state, False, True)[3]
    assert saved.nbytes == workspace_bytes(*sizes, "float32")


@pytest.mark.parametrize(
    ("shape", "dim", "length"), [((4, 6), 0, 2), ((4, 6), 1, 3), ((1, 6, 2), 1, 3), ((4, 6), 1, 6)]
)
def test_slices_copy_where_the_plan_says(shape: tuple[int, ...], dim: int, length: int) -> None:
    for x in (torch.zeros(shape), torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))):
        made = LOCAL_OPS["weft.slice"](x, dim, 0, length)
        copied = made.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert made.is_contiguous()
        if x.is_contiguous() or slice_copies(shape, dim, length):
            assert copied == slice_copies(shape, dim, length)
