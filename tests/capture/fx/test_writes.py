"""Writes that no graph holds are refused: to overlapping tensors, by ops of libraries, and such as change a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

from weft.capture import capture
from weft.errors import CaptureError


def captured(write: Callable[[torch.Tensor], Any], rows: int = 6, like: Any = None) -> Any:
    """A step that writes to a tensor [6, 8]."""

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        h = model(batch).clone()
        write(h)
        return h.sum()

    model = MODEL
    return capture(model, loss, torch.optim.SGD(model.parameters()), torch.ones(rows, 4), like=like)


MODEL = nn.Linear(4, 8)
ROWS = torch.tensor([1])
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expand": lambda h: h[:1].expand(6, 8),
    "broadcast_to": lambda h: h[:1].broadcast_to(6, 8),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h[:, :1], h)[0],
    "as_strided": lambda h: h.as_strided((5, 8), (4, 1)),
    "unfold": lambda h: h.unfold(1, 3, 1),
    "column": lambda h: h[:1].expand(6, 8)[:, 3],
    "detached": lambda h: h[:1].expand(6, 8).detach(),
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill": lambda x: x.fill_(2.0),
    "copy": lambda x: x.copy_(torch.ones(6, 8)),
    "index_put": lambda x: x.index_put_((ROWS,), torch.ones(8)),
    "index_add": lambda x: x.index_add_(0, ROWS, torch.ones(1, 8)),
    "scatter": lambda x: x.scatter_(1, torch.zeros(6, 1, dtype=torch.long), 1.0),
    "mask": lambda x: x.__setitem__(x > 0, 1.0),
    "out": lambda x: torch.add(torch.ones(6, 8), 1, out=x.detach()),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "relu": torch.relu_,
    "dropout": lambda x: nn.functional.dropout(x, 0.5, inplace=True),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_which_elements_overlap(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"view\(h\)\.add_[\s\S]*several elements are at one"):
        captured(lambda h: view(h).add_(1))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_ways_to_write(write: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"several elements are at one place in memory"):
        captured(lambda h: write(h[:1].expand(6, 8)))


def test_a_batch_of_another_shape() -> None:
    first = captured(lambda h: h[:1].expand(len(h), 8).add_(1), rows=1)
    with pytest.raises(CaptureError, match=r"several elements are at one place in memory"):
        captured(lambda h: h[:1].expand(len(h), 8).add_(1), rows=6, like=first)


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h[1:].add_(h[:-1]),
        lambda h: h[:, 1:].copy_(h[:, :-1]),
        lambda h: h.sub_(h[:, :1]),
        lambda h: h[:6, :6].add_(h[:6, :6].t()),
        lambda h: torch.add(h.detach()[1:], 1, out=h.detach()[:-1]),
    ],
)
def test_what_is_read_through_another_view(write: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"memory that it reads through another view"):
        captured(write)


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h[:1].expand(6, 8)[2].add_(1),  # one row
        lambda h: h.expand(1, 6, 8).add_(1),
        lambda h: h.unfold(1, 2, 2).add_(1),
        lambda h: (h.t().add_(1), h.diagonal().add_(1), h[::2, 1::3].add_(1)),
        lambda h: h[:, ::2].copy_(h[:, 1::2]),
        lambda h: h[:, :4].copy_(h[:, 4:]),
        lambda h: h.view(1, 6, 8).add_(h),
        lambda h: h[:1].expand(6, 8).unsqueeze_(0),  # writes no element
        lambda h: h[:, :0].expand(6, 0).fill_(1),
    ],
)
def test_views_whose_elements_lie_apart(write: Callable[[torch.Tensor], Any]) -> None:
    captured(write)


@torch.library.custom_op("weft_tests::writes", mutates_args=("y",))
def writes(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x)


LIBRARY = torch.library.Library("weft_tests", "FRAGMENT")
LIBRARY.define("scale_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("scale_", lambda x: x.mul_(2), "CompositeExplicitAutograd")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda h: torch.ops.weft_tests.scale_(h.detach()), "weft_tests.scale_.default"),
        (lambda h: writes(torch.ones(6, 8), h.detach()), "weft_tests.writes.default"),
    ],
)
def test_ops_of_libraries_that_write(write: Callable[[torch.Tensor], Any], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_writes.*\n  the op {name} writes to an arg"):
        captured(write)


class Observed(nn.Linear):
    """Writes what it computes into a buffer, or observes its weight."""

    def __init__(self, write: Any) -> None:
        super().__init__(4, 8)
        self.write = write
        self.register_buffer("kept", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.write(self, y)
        return y


def resized(model: Any, y: torch.Tensor) -> None:
    model.kept.resize_(y.shape).copy_(y)


FUSED = quantization.default_fused_per_channel_wt_fake_quant
OBSERVER = quantization.PerChannelMinMaxObserver
RESIZING: dict[str, tuple[Callable[[], Any], str]] = {
    "resize_": (lambda: resized, "the step gives kept another shape.* float32\\[6, 8\\]"),
    "out": (lambda: lambda model, y: torch.add(y, 1, out=model.kept), "the step gives kept anoth"),
    "assigned": (
        lambda: lambda model, y: setattr(model, "kept", y.detach()),
        "the step replaces kept",
    ),
    "observer": (lambda: Observing(OBSERVER()), r"the step gives write\.observer\.min_val another"),
    "fused": (
        lambda: Observing(FUSED()),
        r"test_writes[\s\S]*_fused_moving_avg.*from \[\d\] to \[8\]",
    ),
}


class Observing(nn.Module):
    def __init__(self, observer: Any) -> None:
        super().__init__()
        self.observer = observer

    def forward(self, model: Any, y: torch.Tensor) -> None:
        self.observer(model.weight)


@pytest.mark.parametrize(("write", "text"), RESIZING.values(), ids=RESIZING)
@pytest.mark.filterwarnings("ignore")
def test_buffers_that_the_first_call_makes(write: Callable[[], Any], text: str) -> None:
    model = Observed(write())
    batch = torch.ones(6, 4)
    given = (model, lambda model, batch: model(batch).sum(), None, batch)
    with pytest.raises(CaptureError, match=text) as caught:
        capture(*given)
    assert "all the model once before compiling" in str(caught.value)
    model(batch)
    capture(*given)
