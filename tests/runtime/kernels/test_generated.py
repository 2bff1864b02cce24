"""Sums of products over micro-batches are those of all of them, in every step."""

from __future__ import annotations

import torch

from build import ref
from weft.ir.plan import LocalCall, LocalValue
from weft.runtime.kernels.generated import build_kernel

M, ROWS, WIDTH = 3, 5, 4


def test_the_sum_of_products_is_that_of_all_micro_batches_in_every_step():
    made = (LocalValue("total", (WIDTH, WIDTH), "float32"),)
    total = LocalCall.of("weft.accumulate_mm", (ref("a"), ref("b")), made)
    kernel = build_kernel([total], ("total",), torch.device("cpu"), micro_batches=M)
    torch.manual_seed(0)
    for _ in range(2):
        pairs = [(torch.randn(WIDTH, ROWS), torch.randn(ROWS, WIDTH)) for _ in range(M)]
        for micro, (a, b) in enumerate(pairs):
            (made,) = kernel.function(None, micro, a, b)
        torch.testing.assert_close(made, torch.stack([a @ b for a, b in pairs]).sum(0))
