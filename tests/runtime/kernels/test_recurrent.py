"""A layer of an LSTM by oneDNN's kernel and by torch's ops, against torch's own layer."""

# Kernels are called with lists of what their ops take.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tools.oracles import recurrent as check_recurrent
from weft.ops.rules.layers import saved_bytes
from weft.runtime.kernels import layer_ops as recurrent

TIME, BATCH, INPUTS, HIDDEN = 5, 3, 4, 6
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def operands(dtype: torch.dtype, biased: bool) -> list[Tensor | None]:
    """An input whose batch comes first in memory, small weights, biases or none, state and cell."""
    torch.manual_seed(0)
    x = drawn(BATCH, TIME, INPUTS, dtype=dtype).transpose(0, 1)
    weights = [drawn(4 * HIDDEN, n, dtype=dtype) / 4 for n in (INPUTS, HIDDEN)]
    biases = [drawn(4 * HIDDEN, dtype=dtype) if biased else None for _ in range(2)]
    # States that are slices, as those of one layer of several are.
    h, c = drawn(BATCH, 2 * HIDDEN, dtype=dtype).chunk(2, 1)
    return [x, *weights, *biases, h, c]


def given_gradients(dtype: torch.dtype) -> list[Tensor]:
    shapes = ((TIME, BATCH, HIDDEN), (BATCH, HIDDEN), (BATCH, HIDDEN))
    return [drawn(*shape, dtype=dtype) for shape in shapes]


def assert_alike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=atol)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "steps"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("reverse", "biased"), [(False, True), (True, False)])
def test_a_layer_is_torchs(
    kernel: bool, dtype: torch.dtype, reverse: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(recurrent, "_has_kernel", lambda x: False)
    call, gradients = operands(dtype, biased), given_gradients(dtype)
    with torch.no_grad():
        made = recurrent.lstm(*call, reverse, True)
        alone = recurrent.lstm(*call, reverse, False)
        found = recurrent.lstm_backward(*gradients, *call, *made, reverse)
        states_only = recurrent.lstm_backward(gradients[0], None, None, *call, *made, reverse)
    wide = [one if one is None else one.double() for one in call]
    expected = check_recurrent.lstm(*wide, reverse, True)[:3]
    atol = TOLERANCE[dtype]
    assert_alike(made[:3], tuple(one.to(dtype) for one in expected), atol)
    assert_alike(alone[:3], made[:3], atol)
    assert alone[3].numel() == 0
    for each, own in ((gradients, found), ([gradients[0], None, None], states_only)):
        given = [one if one is None else one.double() for one in each]
        whole = check_recurrent.lstm_backward(*given, *wide, *expected, None, reverse)
        assert_alike(own, tuple(one.to(dtype) for one in whole), 4 * atol)
    # Nothing that is returned shares memory, or is recorded by autograd.
    memory = [one.untyped_storage().data_ptr() for one in (*made, *found)]
    assert len(set(memory)) == len(memory)
    assert not any(one.requires_grad for one in made)


@pytest.mark.skipif(
    not recurrent._has_kernel(torch.zeros(1))
    or "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="the workspace's size is known for AVX-512",
)
@pytest.mark.parametrize("sizes", [(9, 64, 40, 32), (6, 32, 64, 128)])
def test_the_plan_knows_what_is_saved(sizes: tuple[int, int, int, int]) -> None:
    steps, batch, inputs, hidden = sizes
    x, weights = torch.zeros(steps, batch, inputs), [torch.zeros(4 * hidden, inputs)]
    weights += [torch.zeros(4 * hidden, hidden)]
    state = torch.zeros(batch, hidden)
    saved = recurrent.lstm(x, *weights, None, None, state, state, False, True)[3]
    planned = batch * saved_bytes(steps, inputs, hidden, "float32", True)
    assert saved.numel() == pytest.approx(planned, rel=0.02)
