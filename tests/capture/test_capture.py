"""Capture as a whole: nothing allocated, nothing changed, same text every time, hints and constants."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import reference
import weft.capture.ops.random as random
from weft.capture import capture, hint
from weft.errors import LayoutError
from weft.ir import parse_graph
from weft.ir.logical import Call, Hint, Input
from weft.layout import Broadcast, Partial, Split


def captured_gpt(**options: Any) -> Any:
    with torch.device("meta"):
        model = models.GPT(**options)
    return capture(
        model, models.token_loss, torch.optim.AdamW(model.parameters()), models.token_batch()
    )


def test_the_text_of_a_small_step(golden: Callable[[str, str], None]) -> None:
    model, batch = models.MLP(dropout=0.1), models.vector_batch(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    text = str(capture(model, models.classification_loss, optimizer, batch).graph)
    golden("".join(line.split(" at ")[0] + "\n" for line in text.splitlines()), "mlp_step")


def test_two_threads_capture_the_same_model() -> None:
    model = models.GPT(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())

    def text(_: int) -> str:
        return str(capture(model, models.token_loss, optimizer, models.token_batch()).graph)

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(text, range(2)))) == 1


def test_a_model_on_the_meta_device_gives_the_same_graph() -> None:
    model = models.GPT(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    graph = capture(model, models.token_loss, optimizer, models.token_batch()).graph
    assert str(captured_gpt(dropout=0.1).graph) == str(graph)
    assert parse_graph(str(graph)) == graph


def test_a_model_too_large_for_any_machine() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10**6, 10**7), nn.ReLU(), nn.Linear(10**7, 10))
    batch = {"x": torch.ones((), device="meta").expand(10**6, 10**6), "y": torch.ones(10**6).long()}
    graph = capture(
        model, models.classification_loss, torch.optim.Adam(model.parameters()), batch
    ).graph
    assert graph.values["0.weight.exp_avg"].shape == (10**7, 10**6)


_PRINT = """
import models, torch, sys
from weft.capture import capture
model = models.GPT(dropout=0.1)
optimizer = torch.optim.AdamW(model.parameters())
sys.stdout.write(str(capture(model, models.token_loss, optimizer, models.token_batch()).graph))
"""


def test_another_process_writes_the_same_text() -> None:
    paths = [str(Path(models.__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {paths!r}\n{_PRINT}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout == str(captured_gpt(dropout=0.1).graph)


def test_nothing_of_the_users_changes() -> None:
    torch.manual_seed(3)
    model = models.ResNet().double()
    model.norm.eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    random_state = torch.get_rng_state()
    batch = models.image_batch()
    x = batch["x"].clone()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.manual_seed(torch.seed())
        return models.classification_loss(model, batch)

    capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(batch["x"], x)
    assert all(p.grad is None and p.is_leaf for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    model = nn.LSTM(8, 8)
    weights = list(model._flat_weights)

    def fails(model: nn.Module, batch: Any) -> Any:
        raise KeyError("no")

    with pytest.raises(Exception, match="KeyError"):
        capture(model, fails, None, models.vector_batch(), training=False)
    assert model.training
    assert all(a is b for a, b in zip(model._flat_weights, weights, strict=True))
    assert hint(model.weight_ih_l0, Broadcast()) is model.weight_ih_l0


def test_constants_are_kept_once_and_by_reference() -> None:
    weight, mask = torch.rand(4), torch.eye(8)[:, :4]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch["x"]) * mask + mask
        return F.cross_entropy(out, batch["y"], weight) * torch.tensor(2.0)

    model, batch = models.MLP(), models.vector_batch(dtype=torch.float32)
    captured = capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)
    keys = [node.key for node in captured.graph.of_kind(Input) if node.role == "constant"]
    assert keys == ["constant0", "constant1", "constant2"] == list(captured.constants)
    assert captured.constants["constant0"] is mask
    assert captured.constants["constant1"] is weight
    result = reference.run_graph(captured.graph, reference.model_inputs(model, captured, batch))
    torch.testing.assert_close(result.outputs["loss"], loss_fn(model, batch).detach())


def test_hints_stand_in_the_graph_and_pass_gradients() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = hint(model.hidden(batch["x"]), sbp=(Split(0), Partial()))
        return F.cross_entropy(hint(model.head(hidden), Broadcast()), batch["y"])

    model, batch = models.MLP().double(), models.vector_batch()
    captured = capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)
    calls = [call for call in captured.graph.of_kind(Call) if call.op == "weft.hint"]
    assert [call.hint for call in calls] == [Hint((Split(0), Partial())), Hint((Broadcast(),))]
    result = reference.run_graph(captured.graph, reference.model_inputs(model, captured, batch))
    loss_fn(model, batch).backward()
    torch.testing.assert_close(result.gradients["hidden.weight"], model.hidden.weight.grad)


@pytest.mark.parametrize("sbp", [(), "S(0)", (Split(0), 1)])
def test_hints_that_are_no_sbp(sbp: Any) -> None:
    with pytest.raises(LayoutError, match="expected an SBP"):
        hint(torch.ones(2), sbp)


class Noisy(nn.Module):
    """Draws with `function` inside its forward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) + self.function(x[:, :4])


@pytest.mark.parametrize(
    ("function", "mean", "std", "low", "high"),
    [
        (torch.rand_like, 0.5, 0.2887, 0.0, 1.0),
        (lambda x: torch.rand(x.shape), 0.5, 0.2887, 0.0, 1.0),
        (lambda x: torch.empty_like(x).uniform_(-2, 2), 0, 1.1547, -2, 2),
        (torch.randn_like, 0, 1, -6, 6),
        (lambda x: torch.randn(x.shape), 0, 1, -6, 6),
        (lambda x: torch.empty_like(x).normal_(1, 3), 1, 3, -17, 19),
        (lambda x: torch.normal(torch.ones_like(x), 0.5), 1, 0.5, -2, 4),
        (lambda x: torch.empty_like(x).exponential_(2), 0.5, 0.5, 0, 20),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.4583, 0, 1),
        (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.4583, 0, 1),
        (lambda x: torch.randint(2, 5, x.shape), 3, 0.8165, 2, 4),
        (lambda x: torch.randint_like(x, 3), 1, 0.8165, 0, 2),
        (lambda x: torch.native_dropout(torch.ones_like(x), 0.5, True)[0], 1, 1, 0, 2),
    ],
)
def test_random_numbers_have_their_distribution(
    function: Any, mean: float, std: float, low: float, high: float
) -> None:
    batch = torch.zeros(4000, 8)
    captured = capture(Noisy(function), lambda m, b: m.function(b), None, batch, training=False)
    result = reference.run_graph(captured.graph, {("batch", "batch"): batch})
    drawn = result.outputs["output"].double()
    assert drawn.mean().item() == pytest.approx(mean, abs=5 * std / drawn.numel() ** 0.5)
    assert drawn.std().item() == pytest.approx(std, rel=0.05)
    assert low <= drawn.min().item() <= drawn.max().item() <= high
    assert "weft.uniform" in str(captured.graph)


def constant_draw(drawn: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand-in for `weft.uniform`: `drawn` everywhere."""
    return torch.full(args[2], drawn, dtype=kwargs["dtype"])


def test_no_draw_of_uniform_makes_an_infinite_number() -> None:
    for drawn in (0.0, 1 - 2.0**-24):
        batch = torch.zeros(2, 8)
        for function in (torch.randn_like, lambda x: x.exponential_().log()):
            noisy = Noisy(function)
            captured = capture(noisy, lambda m, b: m.function(b + 0), None, batch, training=False)
            result = reference.run_graph(
                captured.graph,
                {("batch", "batch"): batch},
                partial(constant_draw, drawn),
            )
            assert result.outputs["output"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    batch = torch.zeros(2, dtype=dtype)
    captured = capture(nn.Identity(), lambda m, b: torch.rand_like(b), None, batch, training=False)
    result = reference.run_graph(
        captured.graph,
        {("batch", "batch"): batch},
        partial(constant_draw, 1 - 2.0**-24),
    )
    assert (result.outputs["output"] < 1).all()
    assert result.outputs["output"].dtype == dtype


def test_uniform_runs_as_a_plain_op_too() -> None:
    torch.manual_seed(0)
    drawn = random.uniform([100], torch.float32, torch.device("cpu"))
    assert 0 <= drawn.min() < drawn.max() < 1


def test_time_grows_linearly_with_layers() -> None:
    captured_gpt(layers=1)
    seconds = []
    for layers in (2, 8):
        start = time.process_time()
        captured_gpt(layers=layers)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 8 * seconds[0]
