"""A fixed part of the OpInfo check, and what the check itself must find; `python -m tools.opinfo` runs all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools.opinfo.__main__ import check_all
from tools.opinfo.check import Effort, OpReport, check_op, shortened
from tools.opinfo.report import page, splits, totals
from tools.opinfo.samples import full_name, opinfos
from tools.scores.samples import rows_of
from tools.scores.stamp import stamp_now
from weft.ops import rule
from weft.runtime.executor import work
from weft.runtime.kernels.generated import Kernel, build_kernel

RIGHT = """
    add mm addmm bmm cumsum sort topk gather scatter_add index_select index_add where
    masked_fill cat stack split roll flip tril diagonal expand permute reshape repeat sum.none mean var
    std amax argmax softmax log_softmax.none nn.functional.layer_norm nn.functional.group_norm
    nn.functional.conv1d nn.functional.max_pool2d nn.functional.interpolate.bilinear
    nn.functional.embedding nn.functional.cross_entropy nn.functional.dropout nn.functional.gelu
    fft.fft fft.irfft linalg.eigh linalg.solve linalg.qr as_strided special.zeta kron view_as_complex
    scatter_reduce.amax rand_like"""
STAMP = stamp_now("python -m tools.opinfo", ["tools/opinfo"])
BY_NAME = {full_name(info): info for info in opinfos()}
NAMES = RIGHT.replace(".none", "").split()


def sample(*args: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        input=args[0], args=args[1:], kwargs={}, output_process_fn_grad=lambda x: x
    )


def info(op: object, *args: torch.Tensor) -> SimpleNamespace:
    """An OpInfo with one sample."""
    return SimpleNamespace(
        name="test",
        variant_test_name="",
        op=op,
        supports_autograd=False,
        sample_inputs=lambda *_, **__: [sample(*args)],
    )


def test_the_names_are_known() -> None:
    assert set(NAMES) <= BY_NAME.keys()


@pytest.mark.parametrize("name", NAMES)
def test_op_is_right(name: str) -> None:
    report = check_op(BY_NAME[name], Effort(samples=2, layouts=4))
    assert report.wrong == []
    assert report.refused == {}
    assert report.right


@pytest.fixture
def wrong_rule(own_rules: None) -> None:
    """Matrix products as if their batch were their result's columns too."""
    rule("aten.digamma.default", "a b -> a b", linear=((0,),))


@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_rule_is_found() -> None:
    report = check_op(info(torch.digamma, torch.rand(5, 6) + 1), Effort())
    assert report.verdict == "wrong"
    assert "aten.digamma.default P(sum) -> P(sum)" in report.wrong[0]


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.capture.python.side_effects._moves", lambda value: False)
    calls = iter(range(100))
    report = check_op(info(lambda x: x + next(calls), torch.rand(5)), Effort())
    assert "captured: result 0 differs" in report.wrong[0]


def test_what_depends_on_values_is_refused() -> None:
    report = check_op(BY_NAME["nonzero"], Effort(samples=2))
    assert report.verdict == "refused"
    assert all(reason.startswith("CaptureError: ") for reason in report.refused)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # threads of other tests, when forking
def test_an_op_that_ends_the_process_is_wrong() -> None:
    infos = [BY_NAME["abs"], BY_NAME["mm"]]
    lost = lambda name, why: OpReport(name, wrong=[why])  # noqa: E731
    found = {report.name: report for report in check_all(infos, exit_or_report, lost, 1)}
    assert found["abs"].wrong == ["ended the process with exit code 3"]
    assert found["mm"].verdict == "right"


def exit_or_report(op: object) -> OpReport:
    name = full_name(op)
    if name == "abs":
        raise SystemExit(3)
    return OpReport(name, right=1)


def test_the_page_tells_totals_and_reasons() -> None:
    reports = [
        OpReport("good", right=3),
        OpReport("half", right=1, refused={"RuleError: no": 2}),
        OpReport("bad", right=1, wrong=["differs"]),
    ]
    assert totals(reports) == {
        "right": 1,
        "shape": 0,
        "partly": 1,
        "refused": 0,
        "wrong": 1,
        "all": 3,
    }
    text = page(reports, Effort(), STAMP)
    assert "| `half` | partly | 1 of 3 |  |  |  |  | RuleError: no |" in text
    assert text.index("`bad`") < text.index("`half`") < text.index("`good`")
    assert str(STAMP) in text


def test_an_op_that_is_only_compared_in_shape_is_no_right_one() -> None:
    """What memory held, and numbers that weft draws otherwise; values of dropout in eval mode are compared."""
    for name in ("empty_like", "rand_like"):
        report = check_op(BY_NAME[name], Effort(samples=2, layouts=1))
        assert (report.verdict, report.shapes) == ("shape", report.right)
    assert check_op(BY_NAME["nn.functional.dropout"], Effort(layouts=1)).verdict == "right"


def test_a_wrong_shape_of_uninitialized_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.capture.python.side_effects._moves", lambda value: False)
    calls = iter(range(100))
    op = info(lambda x: x.new_empty(3 + next(calls)), torch.rand(2))
    op.name = "new_empty"
    assert "result 0 is torch.float32[4]" in check_op(op, Effort()).wrong[0]


def test_what_splits_is_told_from_what_gathers() -> None:
    """Rows of a sum, and of a sort, are split; a histogram reads all elements."""
    report = check_op(info(lambda x: x.sum(0) * 2, torch.rand(4, 6)), Effort())
    assert report.splitting.kind == "splits"
    assert splits(report.splitting) == ("1 of 1", "x0 0 1", "x0", "")
    report = check_op(info(lambda x: x.exp().histc(), torch.rand(4, 6)), Effort())
    assert report.splitting.kind == "whole"
    assert splits(report.splitting) == ("0 of 1", "x0 (0) (1)", "", "histc")
    report = check_op(info(lambda x: x.sort(0)[0], torch.rand(4, 6)), Effort())
    assert splits(report.splitting)[1] == "x0 0 1"


def test_nothing_splits_where_there_is_nothing_to_split() -> None:
    report = check_op(info(lambda x: x + 1, torch.rand(1, 1)), Effort())
    assert report.splitting.kind == "nothing"
    assert check_op(info(lambda x: x + 1, torch.rand(0, 4)), Effort()).splitting.kind == "nothing"


def test_samples_run_as_programs() -> None:
    assert check_op(BY_NAME["mm"], Effort(layouts=1)).ran == 4
    assert check_op(BY_NAME["mm"], Effort(layouts=1, programs=1)).ran == 2


def test_what_only_programs_get_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter calls each op itself, and so does not see the kernels that programs run."""

    def doubled(*args: Any, **kwargs: Any) -> Kernel:
        kernel = build_kernel(*args, **kwargs)
        run = kernel.function
        return replace(kernel, function=lambda *given: [x * 2 for x in run(*given)])

    monkeypatch.setattr(work, "build_kernel", doubled)
    report = check_op(info(torch.exp, torch.rand(8, 2)), Effort(layouts=1))
    assert report.verdict == "wrong"
    assert "program [0, 1, 2, 3]" in report.wrong[0]


def test_reasons_are_cut_at_a_word() -> None:
    assert shortened("one two three", 13) == "one two three"
    assert shortened("one two three", 12) == "one two …"
    reasons = {f"RuleError: {number} " + "word " * 30: 1 for number in range(3)}
    (line,) = [
        line
        for line in page([OpReport("half", 1, refused=reasons)], Effort(), STAMP).splitlines()
        if "`half`" in line
    ]
    assert "0 word" in line
    assert "1 word" in line
    assert "2 word" not in line


def test_the_published_page_has_nothing_wrong() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()
    assert "| wrong | 0 |" in text
    assert sum(splits_of(text)) >= 560


def splits_of(text: str) -> list[int]:
    """How many ops split, in all samples and in some."""
    kinds = ("splits", "in part")
    return [int(row[1]) for row in rows_of(text, 4) if row[0] in kinds]
