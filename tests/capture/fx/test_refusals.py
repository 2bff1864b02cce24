"""What cannot be captured is refused with the user's line and the reason."""

from __future__ import annotations

import inspect
import linecache
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
from weft.capture import capture
from weft.errors import BatchError, CaptureError


def refused(loss_fn: Callable[..., Any], model: nn.Module | None = None, **options: Any) -> str:
    """The message of the error, which must point into this file."""
    model = model or models.MLP().double()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CaptureError) as caught:
        capture(model, loss_fn, optimizer, models.vector_batch(), **options)
    return str(caught.value)


def line_of(function: Callable[..., Any], text: str) -> str:
    """`file:line: source` of the line of `function` that holds `text`."""
    lines, first = inspect.getsourcelines(function)
    found = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + found}: {lines[found].strip()}"


def item(model: nn.Module, batch: Any) -> Any:
    loss = models.classification_loss(model, batch)
    return loss * loss.item()


def branch(model: nn.Module, batch: Any) -> Any:
    loss = models.classification_loss(model, batch)
    if loss > 1:
        loss = loss * 2
    return loss


def sizes(model: nn.Module, batch: Any) -> Any:
    chosen = batch["x"][batch["y"] > 1]
    return model(chosen).sum()


def places(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).sum() + torch.nonzero(batch["y"]).sum()


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [(item, ".item()"), (branch, "if loss > 1"), (sizes, "chosen ="), (places, "nonzero")],
)
def test_steps_that_depend_on_values(loss_fn: Callable[..., Any], text: str) -> None:
    message = refused(loss_fn)
    assert message.startswith(line_of(loss_fn, text))
    assert "values in a tensor" in message


def masked_column(model: nn.Module, batch: Any) -> Any:
    made = model(batch["x"]) * 1
    made[batch["y"] > 1, 2] = made[0, :1]
    return made.sum()


def test_a_backward_that_depends_on_values_names_the_line_of_its_forward() -> None:
    message = refused(masked_column)
    assert message.startswith(line_of(masked_column, "] = made[0, :1]"))
    assert "in its backward, the step would depend on the values in a tensor" in message


def sparse(model: nn.Module, batch: Any) -> Any:
    return model(torch.sparse.mm(batch["x"].to_sparse(), batch["x"])).sum()


def test_sparse_tensors() -> None:
    message = refused(sparse)
    assert message.startswith(line_of(sparse, "to_sparse"))
    assert "sparse tensors are not supported" in message
    batch = {"x": torch.eye(3).to_sparse()}
    with pytest.raises(BatchError, match="'x' of the batch is a sparse .* tensor"):
        capture(models.MLP(), models.classification_loss, None, batch, training=False)


def embedded(model: nn.Module, batch: Any) -> Any:
    return model(batch["y"]).sum()


def test_sparse_gradients_of_an_embedding() -> None:
    message = refused(embedded, nn.Embedding(9, 4, sparse=True))
    assert message.startswith(line_of(embedded, "return"))
    assert "nn.Embedding and nn.EmbeddingBag without sparse=True" in message


def backward(model: nn.Module, batch: Any) -> Any:
    loss = models.classification_loss(model, batch)
    loss.backward()
    return loss


def kept_backward(model: nn.Module, batch: Any) -> Any:
    loss = models.classification_loss(model, batch)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("loss_fn", [backward, kept_backward])
def test_a_loss_function_that_runs_backward(loss_fn: Callable[..., Any]) -> None:
    message = refused(loss_fn)
    assert message.startswith(line_of(loss_fn, "def "))
    assert "runs backward()" in message
    assert "torch.autograd.grad" in message


def in_a_thread(model: nn.Module, batch: Any) -> Any:
    made = list[Any]()
    thread = threading.Thread(target=lambda: made.append(batch["x"] * 2))
    thread.start()
    thread.join()
    return model(made[0]).sum()


def test_tensors_that_a_thread_of_the_step_makes() -> None:
    assert "in another thread" in refused(in_a_thread)


@pytest.mark.parametrize("loss_fn", [3, nn.CrossEntropyLoss(), lambda model: model])
def test_what_is_no_loss_function(loss_fn: Any) -> None:
    assert "weft calls loss_fn(model, batch), and takes a function that" in refused(loss_fn)


LIBRARY = "/somewhere/site-packages/transformers/models/some/modeling.py"
EXPERTS = """
import torch  # @use_experts_implementation
from torch import nn

class SomeExperts(nn.Module):
    def forward(self, x):
        return x[(x > 0).nonzero()]

class Plain(nn.Module):
    def forward(self, x):
        return x[(x > 0).nonzero()]
"""


@pytest.mark.parametrize(
    ("name", "grouped"), [("SomeExperts", True), ("SomeExperts", False), ("Plain", True)]
)
def test_mixtures_of_experts_and_lines_of_libraries(
    name: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    source = EXPERTS if grouped else EXPERTS.replace("@use_experts", "")
    exec(compile(source, LIBRARY, "exec"), made)
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, LIBRARY, (len(source), None, lines, LIBRARY))

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return made[name]()(model(batch["x"])).sum()

    message = refused(loss_fn)
    user, library = message.splitlines()[:2]
    assert user == line_of(loss_fn, "made[name]")
    assert library.strip().startswith(LIBRARY)
    experts = name != "Plain"
    assert ('experts_implementation="grouped_mm"' in message) == (experts and grouped)
    assert ("has no experts_implementation for this model" in message) == (experts and not grouped)


def wrong_shape(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"][:, :3]).sum()


def missing_key(model: nn.Module, batch: Any) -> Any:
    return model(batch["image"]).sum()


def test_the_users_own_mistakes_are_shown_at_their_line() -> None:
    message = refused(wrong_shape)
    assert "models.py" in message.splitlines()[0]
    assert "RuntimeError" in message
    assert refused(missing_key).startswith(line_of(missing_key, "image"))


def gamma(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"] * torch._standard_gamma(batch["x"].abs())).sum()


def seeded(model: nn.Module, batch: Any) -> Any:
    noise = torch.rand(8, 8, generator=torch.Generator(), dtype=torch.float64)
    return model(batch["x"] + noise).sum()


def multinomial(model: nn.Module, batch: Any) -> Any:
    drawn = torch.multinomial(batch["x"].abs(), 2, generator=torch.Generator())
    return model(batch["x"]).sum() + drawn.sum()


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [(gamma, "_standard_gamma"), (seeded, "torch.rand"), (multinomial, "torch.multinomial")],
)
def test_random_ops_without_a_global_position(loss_fn: Callable[..., Any], text: str) -> None:
    message = refused(loss_fn)
    assert message.startswith(line_of(loss_fn, text))
    assert "random" in message


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.rand_like(gradients[0])


def test_random_ops_in_the_backward() -> None:
    def noisy(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(Noisy.apply(model(batch["x"])), batch["y"])  # type: ignore[no-untyped-call]

    message = refused(noisy)
    assert message.startswith(line_of(Noisy.forward, "x.clone"))
    assert "draw them in the forward" in message


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda out: None, "returned None"),
        (lambda out: (), "no loss was found"),
        (lambda out: {"out": out.sum()}, "entry 'loss'"),
        (lambda out: out, "[8, 4]"),
        (lambda out: out.argmax(), "int64"),
        (lambda out: out.sum().detach(), "does not require grad"),
    ],
)
def test_results_without_a_loss(result: Callable[..., Any], words: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return result(model(batch["x"]))

    message = refused(loss_fn)
    assert words in message
    assert message.startswith(line_of(loss_fn, "def loss_fn"))


def test_own_backward_call() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = models.classification_loss(model, batch)
        loss.backward()
        return loss

    assert "backward" in refused(loss_fn)


def test_tensors_written_outside_the_buffers() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4).double()
            self.count = torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            out: torch.Tensor = self.linear(x)
            return out

    model = Counter()
    assert "register_buffer" in refused(models.classification_loss, model)
    assert model.count.tolist() == [0, 0, 0]


def test_parameters_written_in_place() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            model.head.weight.clamp_(-1, 1)
        return models.classification_loss(model, batch)

    assert "parameter 'head.weight' in place" in refused(loss_fn)


def test_foreign_parameters_of_the_optimizer() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(CaptureError, match=r"entry 0 of parameter group 0 .*not a parameter"):
        capture(models.MLP(), models.classification_loss, optimizer, models.vector_batch())


def test_optimizers_that_need_values() -> None:
    model = models.MLP().double()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(CaptureError, match="optimizer LBFGS cannot be captured"):
        capture(model, models.classification_loss, optimizer, models.vector_batch())


def test_devices_that_are_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    assert "'cuda'" in refused(models.classification_loss, device_type="cuda")


def strided(model: nn.Module, batch: Any) -> Any:
    y = batch["x"] * 2.0
    y.view(-1).as_strided((4, 2), (2, 1))[:, 0].mul_(3)
    return models.classification_loss(model, {**batch, "x": y})


def condition(model: nn.Module, batch: Any) -> Any:
    loss = models.classification_loss(model, batch)
    return torch.cond(loss > 1, lambda x: x * 2, lambda x: x * 3, (loss,))


@pytest.mark.parametrize(
    ("loss_fn", "line", "words"),
    [
        (strided, "mul_(3)", "writes through a view of what as_strided() shows"),
        (condition, "torch.cond", "calls a higher-order op of torch (cond)"),
    ],
)
def test_what_no_graph_holds(loss_fn: Callable[..., Any], line: str, words: str) -> None:
    text = refused(loss_fn)
    assert line_of(loss_fn, line) in text
    assert words in text
    assert "such as torch.cond" in text or "index_copy" in text


def test_anomaly_detection() -> None:
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(CaptureError, match="detect_anomaly is on"),
    ):
        capture(models.MLP(), models.classification_loss, None, models.vector_batch())


def test_leaves_that_are_no_tensors() -> None:
    batch = {**models.vector_batch(), "ids": object()}
    with pytest.raises(BatchError, match=r"'ids'.*is of type object"):
        capture(models.MLP().double(), models.classification_loss, None, batch)


class Estimating(torch.optim.SGD):
    """Keeps in the group what all parameters together say."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["scale"] = 2.0
        super().step()


class Branching(torch.optim.SGD):
    """Does nothing where the gradient is small."""

    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["params"][0].grad.norm() > 1:
            super().step()


@pytest.mark.parametrize(
    ("kind", "words"), [(Estimating, "changes 'scale'"), (Branching, "branches on the value")]
)
def test_optimizers_that_look_at_all_parameters_or_at_values(kind: Any, words: str) -> None:
    model = models.MLP().double()
    with pytest.raises(CaptureError, match=words):
        capture(
            model,
            models.classification_loss,
            kind(model.parameters(), lr=0.1),
            models.vector_batch(),
        )
