"""`kernels="torch"`: nothing but torch's own kernels, and the same results."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from weft.compiler.decompositions import fused_losses
from weft.errors import UserError
from weft.program.planning import build
from weft.runtime.executor import work
from weft.runtime.kernels.generated import build_kernel

pytestmark = pytest.mark.timeout(120)

# Kernels that stand for torch's ops, not for parts of them that torch lacks.
OWN = {
    *("weft.large_mm", "weft.large_addmm", "weft.batch_norm", "weft.batch_norm_backward"),
    *("weft.cross_entropy_backward", "weft.class_scores", "weft.class_loss", "weft.accumulate_mm"),
    *("weft.class_loss_backward",),
}


class Net(nn.Module):
    """Large images under BatchNorm, a loop over one weight, wide products, many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.cell = nn.LSTMCell(16, 32)
        self.up, self.head = nn.Linear(32, 256), nn.Linear(256, 512, bias=False)

    def forward(self, x):
        seen = self.norm(self.first(x)).mean((1, 2))
        state = None
        for _ in range(3):
            state = self.cell(seen, state)
        return self.head(self.up(state[0]))


def loss_fn(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parts(rows=64):
    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.randn(rows, 1, 64, 16), "y": torch.randint(512, (rows,))}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch


SPLIT = weft.Strategy(batch={"*": weft.split(0)}, parameters={"head.weight": weft.split(0)})
# Ranks, the strategy, and what stands for torch's ops by default.
CASES = {
    "alone": (1, None, {"weft.large_mm", "weft.batch_norm", "weft.cross_entropy_backward"}),
    "data parallel": (2, None, {"weft.large_mm", "weft.cross_entropy_backward"}),
    "split classes": (2, SPLIT, {"weft.class_scores", "weft.class_loss"}),
    "micro-batches": (1, weft.Strategy(micro_batches=2), {"weft.accumulate_mm"}),
}


def trained(ranks, strategy, kernels, monkeypatch, rows=64):
    """The losses of two steps and of an evaluation, and the ops that ran."""
    model, optimizer, batch = parts(rows)
    ran = []

    def noting(calls, *arguments, **named):
        ran.extend(calls)
        return build_kernel(calls, *arguments, **named)

    monkeypatch.setattr(work, "build_kernel", noting)
    with weft.local_world(ranks):
        program = weft.compile(
            *(model, loss_fn, optimizer, batch),
            placement=weft.placement("cpu", range(ranks)),
            strategy=strategy,
            kernels=kernels,
        )
        losses = [float(program.step(batch)) for _ in range(2)]
        evaluated = program.evaluation(loss_fn, batch)
        losses.append(float(evaluated.step(batch)))
        program.close()
    return losses, [call.op for call in ran]


@pytest.mark.parametrize("case", CASES)
def test_torchs_own_kernels_alone_give_the_same(case, monkeypatch):
    ranks, strategy, expected = CASES[case]
    monkeypatch.setattr(fused_losses, "SMALLEST", 1)
    monkeypatch.setattr(
        build, "onednn_is_faster", lambda: hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    default, used = trained(ranks, strategy, "aten", monkeypatch)
    plain, seen = trained(ranks, strategy, "torch", monkeypatch)
    assert expected <= set(used)
    assert not OWN & set(seen)
    assert plain == pytest.approx(default, rel=1e-5)


def test_products_of_a_loop_are_not_joined(monkeypatch):
    _, used = trained(1, None, "aten", monkeypatch, rows=8)
    _, seen = trained(1, None, "torch", monkeypatch, rows=8)
    assert used.count("aten.stack.default") > seen.count("aten.stack.default") == 0


def test_an_unknown_kind_is_told():
    with pytest.raises(UserError, match='"aten", "torch", "inductor" or "auto", got \'fast\''):
        weft.compile(*parts()[:1], placement=weft.placement("cpu", [0]), kernels="fast")
