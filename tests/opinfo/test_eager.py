"""A fixed part of the eager check, and what the check itself must find; `--eager` runs all of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import weft
from tools.opinfo.check import Effort
from tools.opinfo.eager import DTYPES, EagerEffort, EagerReport, check_eager, lost
from tools.opinfo.eager_report import TITLE, as_json, section, summary, write_table
from tools.opinfo.report import write_page
from tools.opinfo.samples import full_name, opinfos
from tools.scores.stamp import stamp_now

NAMES = """
    add mul matmul square pow floor_divide ldexp polygamma.polygamma_n_1 unsqueeze t copysign
    cat select_scatter slice_scatter as_strided index_put masked_select nonzero unique prod cumprod
    sum var softmax.with_dtype nn.functional.avg_pool2d nn.functional.conv2d nn.functional.dropout
    nn.functional.multi_margin_loss nn.functional.scaled_dot_product_attention native_batch_norm
    fft.hfft2 linalg.inv linalg.solve linalg.pinv linalg.vector_norm masked.var tensor_split resize_"""
STAMP = stamp_now("python -m tools.opinfo --eager", ["tools/opinfo"])
QUICK = (torch.float32, torch.int64, torch.complex64)
BY_NAME = {full_name(info): info for info in opinfos(DTYPES)}


@pytest.mark.parametrize("name", NAMES.split())
def test_op_is_right(name: str) -> None:
    report = check_eager(BY_NAME[name], EagerEffort(samples=1, dtypes=QUICK))
    assert report.wrong == []
    assert report.verdict == "right"
    assert report.counts


def info(op: object, *args: torch.Tensor) -> SimpleNamespace:
    """An OpInfo with one sample, which has no method that writes in place."""
    given = {"input": args[0], "args": args[1:], "kwargs": {}}
    sample = SimpleNamespace(**given, output_process_fn_grad=lambda x: x)
    return SimpleNamespace(
        name="test",
        variant_test_name="",
        op=op,
        inplace_variant=None,
        supports_autograd=False,
        supported_dtypes=lambda device: {torch.float32},
        sample_inputs=lambda *_, **__: [sample],
    )


def is_global(x: torch.Tensor) -> bool:
    return isinstance(x, weft.GlobalTensor)


def refuse(x: torch.Tensor) -> torch.Tensor:
    if is_global(x):
        raise weft.errors.LayoutError("no")
    return x


@pytest.mark.parametrize(
    ("op", "verdict", "why"),
    [
        (lambda x: x * 2, "right", None),
        (lambda x: x + is_global(x), "wrong", "result 0 differs"),
        (lambda x: x.double() if is_global(x) else x, "wrong", "is torch.float64"),
        (is_global, "wrong", "is True, not False"),
        (lambda x: x.sum().item() / (not is_global(x)), "crash", "ZeroDivisionError"),
        (refuse, "refused", "LayoutError: no"),
        (lambda x: torch.rand_like(x), "right", None),
        (
            lambda x: torch.rand_like(x).double() if is_global(x) else torch.rand_like(x),
            "wrong",
            "is torch.float64",
        ),
    ],
)
def test_each_verdict_is_found(op: object, verdict: str, why: str | None) -> None:
    report = check_eager(info(op, torch.arange(6.0)), EagerEffort())
    assert report.verdict == verdict
    assert why is None or why in next(iter(report.reasons))[1]


def test_the_page_keeps_both_tables(tmp_path: Path) -> None:
    good, bad = EagerReport("good"), lost("bad", "ended the process")
    good.add(torch.int64, "in place", "right", "")
    good.add(torch.float32, "function", "refused", "LayoutError: no")
    text = section([good, bad], EagerEffort(), STAMP)
    assert "| float32 | function | 0 | 1 | 0 | 1 |" in text
    assert "| int64 | in place | 1 | 0 | 0 | 0 |" in text
    assert "| `good` | 1 of 2 | LayoutError: no |" in text
    assert text.index("`bad`") < text.index("`good`")
    assert "33.3 % are refused" in text
    assert summary([good, bad]).endswith("1 right, 1 refused, 0 wrong, 1 crash")
    assert as_json([bad])["bad"]["counts"] == {"float32 / function / crash": 1}
    path = tmp_path / "ops.md"
    write_table(path, [good, bad], EagerEffort(), STAMP)
    write_page(path, [], Effort(), STAMP)
    write_table(path, [good], EagerEffort(), STAMP)
    assert path.read_text().count(TITLE) == 1
    assert path.read_text().startswith("# Ops")
    assert "`bad`" not in path.read_text()


def test_the_published_page_has_nothing_wrong_and_refuses_little() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ops.md").read_text().partition(TITLE)[2]
    (row,) = [line for line in text.splitlines() if line.startswith("| all | | ")]
    right, refused, wrong, crash = (int(cell) for cell in row.split("|")[3:7])
    assert right > 5000
    assert refused <= 0.05 * (right + refused)
    assert (wrong, crash) == (0, 0)
