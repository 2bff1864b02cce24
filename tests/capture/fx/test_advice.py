"""What is refused for reading values says what would do in place of that construct, and that does."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import models
from weft.capture import capture
from weft.capture.fx.refusals import REMEDIES
from weft.errors import CaptureError

Batch = dict[str, Tensor]
Step = Callable[[nn.Module, Batch], Any]
loss = models.classification_loss


def captured(loss_fn: Step) -> None:
    model = models.MLP().double()
    optimizer = torch.optim.SGD(model.parameters())
    capture(model, loss_fn, optimizer, models.vector_batch())


def check_of_a_number(m: nn.Module, b: Batch) -> Any:
    assert b["y"].max().item() <= 3
    return loss(m, b)


def check_that_raises(m: nn.Module, b: Batch) -> Any:
    if b["y"].max().item() > 3:
        raise ValueError("y")
    return loss(m, b)


def branch(m: nn.Module, b: Batch) -> Any:
    out = m(b["x"])
    if not torch.isfinite(out).all():
        out = out.clamp(-1, 1)
    return F.cross_entropy(out, b["y"])


def choice(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) * 2 if loss(m, b).item() > 1 else loss(m, b)


def larger(m: nn.Module, b: Batch) -> Any:
    return max(loss(m, b), loss(m, b) * 2)


def loop(m: nn.Module, b: Batch) -> Any:
    found = loss(m, b)
    while found > 1:
        found = found / 2
    return found


def mask(m: nn.Module, b: Batch) -> Any:
    kept = b["y"] > 1
    return F.cross_entropy(m(b["x"])[kept], b["y"][kept])


def masked_select(m: nn.Module, b: Batch) -> Any:
    return m(b["x"])[:, 0].masked_select(b["y"] > 1).mean()


def places(m: nn.Module, b: Batch) -> Any:
    return m(b["x"])[torch.where(b["y"] > 1)[0]].mean()


def bincount(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) * torch.bincount(b["y"]).max()


def unique(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) * torch.unique(b["y"]).numel()


def classes(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) * F.one_hot(b["y"]).sum()


def repeats(m: nn.Module, b: Batch) -> Any:
    return m(b["x"]).repeat_interleave(b["y"], 0).mean()


def count(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) / int((b["y"] > 1).sum())


def number(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) / (b["y"] > 1).sum().item()


def size(m: nn.Module, b: Batch) -> Any:
    return m(b["x"])[: b["y"].max()].mean()


def size_of_a_picture(m: nn.Module, b: Batch) -> Any:
    n = b["y"].max().item()
    return loss(m, b) * F.interpolate(b["x"][None, None], size=(n, n)).sum()  # type: ignore[arg-type]


def size_of_a_tensor(m: nn.Module, b: Batch) -> Any:
    n = b["y"].max().item()
    return loss(m, b) * torch.arange(n).sum()


def size_of_a_view(m: nn.Module, b: Batch) -> Any:
    return m(b["x"]).view(int(b["y"].max()) + 1, -1).mean()


def shown(m: nn.Module, b: Batch) -> Any:
    found = loss(m, b)
    return found if f"{found:.3f}" else None


def made_anew(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) * torch.tensor([b["y"].sum(), b["y"].max()]).sum()


def turns(m: nn.Module, b: Batch) -> Any:
    return sum(loss(m, b) for _ in range(b["y"].max()))


def index(m: nn.Module, b: Batch) -> Any:
    return m(b["x"])[b["y"].max()].mean()


def index_of_a_column(m: nn.Module, b: Batch) -> Any:
    return m(b["x"])[:, b["y"][0]].mean()


def written_index(m: nn.Module, b: Batch) -> Any:
    out = m(b["x"]) * 1
    out[b["y"][0]] = 0
    return out.mean()


def of_a_list(m: nn.Module, b: Batch) -> Any:
    return [loss(m, b)] * 4 and [loss(m, b)][b["y"][0]]


def dims(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) * b["x"].sum(dim=b["y"][:2].tolist())


def lengths(m: nn.Module, b: Batch) -> Any:
    return torch.split(m(b["x"]), b["y"].tolist())[0].mean()


def numpy(m: nn.Module, b: Batch) -> Any:
    return loss(m, b) * float(m(b["x"]).detach().numpy().sum())


def distribution(m: nn.Module, b: Batch) -> Any:
    spread = torch.eye(3).double() * (1 + b["x"].mean() ** 2)
    normal = torch.distributions.MultivariateNormal(torch.zeros(3).double(), spread)
    return loss(m, b) - normal.log_prob(torch.zeros(3).double())


@pytest.mark.parametrize(
    ("loss_fn", "kind"),
    [
        (check_of_a_number, "check"),
        (check_that_raises, "check"),
        (branch, "branch"),
        (choice, "branch"),
        (larger, "branch"),
        (loop, "loop"),
        (mask, "mask"),
        (masked_select, "mask"),
        (places, "mask"),
        (bincount, "bincount"),
        (unique, "unique"),
        (classes, "classes"),
        (repeats, "repeats"),
        (count, "number"),
        (number, "number"),
        (size, "size"),
        (size_of_a_picture, "size"),
        (turns, "size"),
        (size_of_a_tensor, "size"),
        (size_of_a_view, "size"),
        (shown, "number"),
        (made_anew, "stack"),
        (index, "index"),
        (index_of_a_column, "index"),
        (written_index, "index"),
        (of_a_list, "index"),
        (dims, "list"),
        (lengths, "list"),
        (numpy, "numpy"),
        (distribution, "check of a distribution"),
    ],
)
def test_each_construct_has_its_remedy(loss_fn: Step, kind: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(loss_fn)
    message = str(caught.value)
    assert message.startswith(f"{__file__}:")
    assert message.endswith(REMEDIES[kind])
    assert "UnbackedNumber" not in message


def remedy_of_check(m: nn.Module, b: Batch) -> Any:
    assert (b["y"] <= 3).all()
    return loss(m, b)


def remedy_of_mask(m: nn.Module, b: Batch) -> Any:
    kept, found = b["y"] > 1, F.cross_entropy(m(b["x"]), b["y"], reduction="none")
    return (found * kept).sum() / kept.sum()


def remedy_of_counts(m: nn.Module, b: Batch) -> Any:
    differ = (b["y"].sort().values.diff() != 0).sum() + 1
    return loss(m, b) * F.one_hot(b["y"], 4).sum(0).max() * differ


def remedy_of_repeats(m: nn.Module, b: Batch) -> Any:
    return m(b["x"]).repeat_interleave(b["y"], 0, output_size=12).mean()


def remedy_of_index(m: nn.Module, b: Batch) -> Any:
    out, place = m(b["x"]), b["y"].max().reshape(1)
    rows = torch.take_along_dim(out, b["y"][:, None], 1)
    out = out.index_copy(0, place, out.new_zeros(1, out.shape[1]))
    return out.index_select(0, place).squeeze(0).mean() + rows.mean()


def remedy_of_size(m: nn.Module, b: Batch) -> Any:
    kept = torch.arange(len(b["y"])) < b["y"].max()
    return (m(b["x"]).mean(1) * kept).sum() / kept.sum()


@pytest.mark.parametrize(
    "loss_fn", [x for name, x in list(globals().items()) if name.startswith("remedy_of_")]
)
def test_remedies_are_captured(loss_fn: Step) -> None:
    captured(loss_fn)


class Passing(TorchFunctionMode):
    """Does nothing but hand calls on, as modes that count or log do."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


def checked_in_a_mode(m: nn.Module, b: Batch) -> Any:
    with Passing():
        if (b["y"] < 0).any():
            raise ValueError("negative")
        return loss(m, b)


def branch_in_a_mode(m: nn.Module, b: Batch) -> Any:
    with Passing():
        return branch(m, b)


class Looking(TorchFunctionMode):
    """Branches by itself, while a check of the step is handed on."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is Tensor.__bool__ and (args[0] * 1).sum() > 0:
            f = Tensor.__bool__
        return f(*args, **(kwargs or {}))


def looked_at(m: nn.Module, b: Batch) -> Any:
    with Looking():
        if (b["y"] < 0).any():
            raise ValueError("negative")
        return loss(m, b)


def test_a_mode_of_the_user_hides_neither_checks_nor_lines() -> None:
    captured(checked_in_a_mode)
    with pytest.raises(CaptureError, match="isfinite"):
        captured(branch_in_a_mode)
    with pytest.raises(CaptureError, match="if f is Tensor.__bool__"):
        captured(looked_at)


def test_a_check_without_source_says_so() -> None:
    made: dict[str, Any] = {"loss": loss}
    source = inspect.getsource(checked_in_a_mode).replace("with Passing()", "if True")
    exec(compile(ast.parse(textwrap.dedent(source)), "<stdin>", "exec"), made | {"nn": nn}, made)
    made["checked_in_a_mode"].__globals__.update(loss=loss)
    with pytest.raises(CaptureError, match="Python has the source of its line"):
        captured(made["checked_in_a_mode"])
