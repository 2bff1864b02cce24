"""The self-check: it passes what is right, changes nothing, and catches what is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from models import GPT, ResNet, classification_loss, image_batch, token_batch, token_loss
from on_ranks import passed
from weft.compiler.training import gradients as clip
from weft.errors import BatchError, VerificationError
from weft.program.verification.compare import Rounding, compare
from weft.runtime.executor import optimizer as updates

S, B = weft.split, weft.broadcast
DATA = weft.data_parallel()
TENSOR = weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"])
HYBRID = weft.hybrid_parallel(["blocks.*.up"], ["blocks.*.down"])
PIPELINE = replace(DATA, stages=2, micro_batches=2)
BATCH = token_batch(4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@contextmanager
def compiled(
    model: nn.Module,
    loss_fn: Any = token_loss,
    batch: Any = BATCH,
    grid: Any = (0, 1),
    strategy: weft.Strategy = DATA,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = adamw,
    **options: Any,
) -> Iterator[weft.Program]:
    optimizer = None if make_optimizer is None else make_optimizer(model)
    with weft.local_world(torch.tensor(grid).numel()):
        program = weft.compile(
            model,
            loss_fn,
            optimizer,
            batch,
            placement=weft.placement("cpu", grid),
            strategy=strategy,
            **options,
        )
        yield program
        program.close()


def gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(layers=1, dropout=dropout)


@pytest.fixture
def iterators_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for whatever capture does not see: a step may take from iterators."""
    monkeypatch.setattr("weft.capture.python.side_effects._moves", lambda value: False)


# What is right passes.


@pytest.mark.parametrize(
    ("grid", "strategy"),
    [
        ([0], DATA),
        ([0, 1], replace(DATA, zero=weft.Zero(3), clip_norm=0.1)),
        ([0, 1], TENSOR),
        ([[0, 1], [2, 3]], HYBRID),
        ([0, 1], PIPELINE),
    ],
    ids=["one rank", "zero 3, clipped", "tensor", "hybrid", "pipeline"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_step_agrees_at_first_and_later(grid: Any, strategy: Any, dropout: float) -> None:
    with compiled(gpt(dropout), grid=grid, strategy=strategy) as program:
        for _ in range(2):
            found = program.verify(BATCH)
            kinds = {each.kind for each in found.compared}
            assert kinds == {"output", "gradient", "parameter", "state"}
            assert all(each.difference < 1e-5 for each in found.compared)
            program.step(BATCH)
    parameters = len(list(gpt().parameters()))
    assert f"{parameters} gradients" in str(found)


@pytest.mark.parametrize(
    "precision",
    [
        weft.Precision(compute="bf16"),
        weft.Precision(compute="bf16", parameters="bf16", reduce="bf16"),
        weft.Precision(compute="fp16"),
    ],
    ids=["bf16", "bf16 parameters", "fp16"],
)
def test_a_step_of_16_bits_agrees(precision: weft.Precision) -> None:
    strategy = replace(DATA, precision=precision)
    with compiled(gpt(), strategy=strategy) as program:
        found = program.verify(BATCH)
        loss = found.largest("output")
    assert loss is not None
    assert loss.allowed < 0.1 * loss.scale


def test_masters_are_what_the_optimizer_updates() -> None:
    strategy = replace(DATA, precision=weft.Precision(masters=True))
    with compiled(gpt().bfloat16(), strategy=strategy) as program:
        program.step(BATCH)
        assert program.verify(BATCH).largest("parameter") is not None


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("strategy", [DATA, replace(DATA, micro_batches=2)], ids=["data", "micro"])
def test_batch_norm_agrees(strategy: weft.Strategy) -> None:
    torch.manual_seed(0)
    batch = image_batch(8)
    with compiled(ResNet(), classification_loss, batch, strategy=strategy) as program:
        found = program.verify(batch)
    buffers = [each for each in found.compared if each.kind == "buffer"]
    assert len(buffers) == len(list(ResNet().buffers()))
    # In float64 rounding is small, though the optimizer counts steps in float32.
    assert all(
        each.allowed < 1e-11 * max(each.scale, 1.0)
        for each in found.compared
        if each.kind != "state"
    )


class Random(nn.Module):
    """Draws in every way: a checkpoint, attention, an LSTM, samples, and a draw that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.up = nn.Linear(8, 8)
        self.slope = nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        y = self.lstm(x)[0]
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
        y = checkpoint(lambda z: F.dropout(self.slope(self.up(z)), 0.5), y, use_reentrant=False)
        y = y + torch.randn_like(y) * torch.bernoulli(torch.full_like(y, 0.5))
        order = torch.randperm(y.shape[1])
        result: torch.Tensor = y[:, order]
        return result


def mean_square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(batch["x"]).square().mean()
    return result


def test_random_ops_draw_what_the_plan_draws() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 8)}
    with compiled(Random(), mean_square, batch) as program:
        for _ in range(2):
            program.verify(batch)
            program.step(batch)


def test_an_evaluation_agrees() -> None:
    def logits(model: nn.Module, batch: Any) -> Any:
        assert not model.training
        return {"logits": model(batch["x"]), "best": model(batch["x"]).argmax(-1)}

    model = gpt(0.5)
    with compiled(model) as program:
        check = program.evaluation(logits, BATCH)
        found = check.verify(BATCH)
        assert {each.name for each in found.compared if each.kind == "output"} == {"logits", "best"}
        assert not [each for each in found.compared if each.kind in ("gradient", "state")]
        assert model.training


def test_a_model_that_the_loss_function_holds_itself_is_the_plain_one() -> None:
    model = gpt()
    weight = model.head.weight

    def loss(_: nn.Module, batch: Any) -> torch.Tensor:
        return token_loss(model, batch) + weight.square().mean()

    with compiled(model, loss) as program:
        program.verify(BATCH)


@pytest.mark.usefixtures("iterators_not_seen")
def test_hooks_run_in_the_plain_step_and_once_afterwards() -> None:
    model = gpt()
    numbers, calls = itertools.count(), []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(next(numbers))
        return gradient * 2

    model.norm.bias.register_hook(double)
    with compiled(model) as program:
        calls.clear()
        begun = next(numbers)
        program.verify(BATCH)
        assert calls == []
        token_loss(model, everywhere(BATCH)).backward()  # type: ignore[no-untyped-call]
        assert calls == [
            begun + 7
        ]  # of two plain steps each runs twice, and once moved by rounding
        program.verify(BATCH)


def everywhere(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    place = weft.placement("cpu", [0, 1])
    return {key: weft.tensor(x, placement=place, sbp=B) for key, x in batch.items()}


# Nothing is changed.


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Values of everything that belongs to the user, and the identities of what is there."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    every: dict[str, Any] = {key: (id(x), exact(x)) for key, x in tensors.items()}
    every.update({f"{key}.grad": exact(x.grad) for key, x in model.named_parameters()})
    for key, parameter in model.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            every[f"{key}.{name}"] = (id(value), exact(value))
    every["options"] = [
        {k: x for k, x in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    return every


def exact(value: Any) -> Any:
    if isinstance(value, weft.GlobalTensor):
        return [part.tolist() for part in value.shards().values()]
    return value.detach().tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("grid", [[0], [0, 1]], ids=["one rank", "two ranks"])
def test_the_program_goes_on_as_if_it_had_not_been_verified(grid: Any) -> None:
    def losses(verify: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
        options: Any = {"metrics": ["grad_norm"], "strategy": replace(DATA, clip_norm=0.1)}
        found = []
        with compiled(
            model, mean_square, batch, grid, make_optimizer=lambda _: optimizer, **options
        ) as program:
            for number in range(3):
                if verify:
                    before, drawn = state_of(model, optimizer), torch.get_rng_state()
                    metrics = dict(program.metrics)
                    program.verify(batch)
                    assert state_of(model, optimizer) == before
                    assert len(optimizer.state) == (4 if number else 0)
                    assert torch.equal(torch.get_rng_state(), drawn)
                    assert program.metrics == metrics
                found.append(program.step(batch).item())
                schedule.step()
            return found, exact_of(program.full_state_dict())

    assert losses(True) == losses(False)


def exact_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: x.tolist() for key, x in state.items()}


def test_gradients_that_wait_for_an_update_stay() -> None:
    def losses(verify: bool) -> list[float]:
        model = gpt()
        with compiled(model) as program:
            program.step(BATCH, update=False)
            gradient = model.head.weight.grad
            if verify:
                program.verify(BATCH)
                assert model.head.weight.grad is gradient
            program.step(token_batch(4, seed=1))
            assert model.head.weight.grad is None
            return [program.step(BATCH).item()]

    assert losses(True) == losses(False)


def test_python_objects_are_put_back() -> None:
    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.seen: list[Any] = []
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(1)
            self.last = result = self.up(x)
            return result

    model, outside = Noted(), []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        result = mean_square(model, batch)
        outside.append(result)
        batch["y"].zero_()
        return result

    batch = {"x": torch.randn(4, 8), "y": torch.ones(4)}
    with compiled(model, loss, batch) as program:
        program.verify(batch)
        assert model.seen == outside == []
        assert model.last is None
        assert torch.equal(batch["y"], torch.ones(4))


def test_a_loss_of_the_live_model_can_still_run_backward() -> None:
    model = gpt()
    with compiled(model) as program:
        loss = token_loss(model, everywhere(BATCH))
        program.verify(BATCH)
        loss.backward()  # type: ignore[no-untyped-call]
        assert isinstance(model.head.weight.grad, weft.GlobalTensor)


# What is wrong is caught, and named with its line.


def failure(program: weft.Program, batch: Any = BATCH) -> str:
    before = exact_of(program.full_state_dict())
    with pytest.raises(VerificationError) as caught:
        program.verify(batch)
    assert exact_of(program.full_state_dict()) == before
    return str(caught.value)


@pytest.mark.usefixtures("iterators_not_seen")
def test_what_changes_from_call_to_call() -> None:
    numbers = count(1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return token_loss(model, batch) * next(numbers)

    with compiled(gpt(), loss) as program:
        text = failure(program)
    assert "run twice" in text
    assert "the output loss differs by" in text
    assert f"{__file__}:{loss.__code__.co_firstlineno + 1}" in text
    assert "docs/soundness.md" in text


@pytest.mark.usefixtures("iterators_not_seen")
def test_a_number_that_is_returned_as_it_was() -> None:
    numbers = count(1)

    def loss(model: nn.Module, batch: Any) -> Any:
        return {"loss": token_loss(model, batch), "calls": next(numbers)}

    with compiled(gpt(), loss) as program:
        assert "the output calls is 1 in the plan" in failure(program)


def test_what_libraries_read_deep_in_objects() -> None:
    config = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(scale=1.0))))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.config = config

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.up(x) * read(self.config).scale
            return result

    def read(config: Any) -> Any:
        return getattr(getattr(getattr(config, "a"), "b"), "c")  # noqa: B009

    def still(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    batch = {"x": torch.randn(4, 8)}
    with compiled(Scaled(), mean_square, batch, make_optimizer=still) as program:
        before = program.step(batch)
        config.a.b.c.scale = 2.0
        program.verify(batch)
        torch.testing.assert_close(program.step(batch), 4 * before)


@pytest.mark.usefixtures("own_rules")
def test_a_wrong_rule() -> None:
    weft.rule("aten.cumsum.default", "a b -> a b", adapt=lambda call, cut: call)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).cumsum(0).square().mean()

    batch = {"x": torch.randn(4, 8)}
    with compiled(nn.Linear(8, 8), loss, batch) as program:
        text = failure(program, batch)
    assert "the output loss differs by" in text


def test_a_hook_that_capture_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weft.capture.tracing.step_call.gradient_hooks", lambda p: dict.fromkeys(p, ())
    )
    model = gpt()
    model.blocks[0].up.bias.register_hook(lambda gradient: gradient * 1.001)
    with compiled(model) as program:
        text = failure(program)
    assert "the gradient blocks.0.up.bias differs by" in text
    assert "in blocks.0.up (backward)" in text
    assert "more differ" not in text


def test_an_update_that_is_not_the_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = updates.OptimizerUpdates._gradients

    def wrong(self: Any, sources: Any) -> Any:
        first, *others = right(self, sources)
        return [first * -1, *others]

    monkeypatch.setattr(updates.OptimizerUpdates, "_gradients", wrong)
    with compiled(gpt()) as program:
        text = failure(program)
    assert "the updated tokens.weight differs by" in text
    assert "the state tokens.weight.exp_avg" in text


def test_a_norm_of_the_gradients_that_leaves_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled(gpt(), metrics=["grad_norm"]) as program:
        names = {each.name for each in program.verify(BATCH).compared}
        assert "metrics['grad_norm']" in names
    every = vars(clip)["gradients"]
    monkeypatch.setattr(clip, "gradients", lambda *given: every(*given)[1:])
    with compiled(gpt(), metrics=["grad_norm"]) as program:
        assert "the output metrics['grad_norm'] differs by" in failure(program)


def test_a_buffer_that_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "copy_all", lambda targets, sources: None)
    batch = image_batch(4)
    with compiled(ResNet().double(), classification_loss, batch) as program:
        text = failure(program, batch)
    assert "the buffer norm." in text
    assert "is the largest" not in text


@pytest.mark.usefixtures("iterators_not_seen")
def test_a_draw_that_the_plain_step_does_not_make() -> None:
    calls = iter([True])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return token_loss(model, batch) * (torch.rand(()) + 1 if next(calls, False) else 1.0)

    with compiled(gpt(), loss) as program:
        assert "draws 1 random tensors that a plain eager step does not" in failure(program)


@pytest.mark.usefixtures("iterators_not_seen")
def test_an_evaluation_that_differs() -> None:
    numbers = count(1)
    with compiled(gpt()) as program:
        check = program.evaluation(lambda model, batch: model(batch["x"]) * next(numbers), BATCH)
        assert "the output output differs" in failure(check)


# As an option of compile.


@pytest.mark.usefixtures("iterators_not_seen")
def test_compile_verifies_before_training() -> None:
    numbers = count(1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return token_loss(model, batch) * next(numbers)

    with compiled(gpt(), verify=True) as program:
        assert "0 steps made" in repr(program)
    model = gpt()
    with (
        pytest.raises(VerificationError, match="the output loss"),
        compiled(model, loss, verify=True),
    ):
        pass
    # The program was closed, so that the model can be laid out anew.
    with compiled(model, strategy=TENSOR, verify=True):
        pass
    with weft.local_world(2):
        step = weft.Step(model, token_loss, adamw(model), BATCH)
        weft.compile(step, placement=weft.placement("cpu", [0, 1]), verify=True).close()


def test_a_batch_without_values() -> None:
    batch = {key: x.to("meta") for key, x in BATCH.items()}
    with (
        pytest.raises(BatchError, match="leaf x is on the meta device"),
        compiled(gpt(), batch=batch, verify=True),
    ):
        pass
    with compiled(gpt(), batch=batch) as program:
        with pytest.raises(BatchError, match="leaf x is on the meta device"):
            program.verify(batch)
        program.verify(BATCH)


@pytest.mark.thorough
def test_processes_find_the_same(tmp_path: Path) -> None:
    script = Path(__file__).with_name("verify_on_processes.py")
    passed(script, 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert "the output loss differs by" in first.pop("differs")
    assert all("gradients" in text for text in first.values())


@pytest.mark.parametrize(
    ("found", "expected", "agrees"),
    [
        (1, 2.0, False),
        ("a", 3, False),
        (None, 5, False),
        (5, None, False),
        (True, 1, False),
        (5, object(), False),
        (torch.zeros(2), 5, False),
        (None, object(), True),
        (None, None, True),
        (2.5, 2.5, True),
        (float("nan"), float("nan"), True),
        (torch.zeros(2), None, True),
    ],
)
def test_plain_values_agree_when_type_and_value_are_the_same(
    found: Any, expected: Any, agrees: bool
) -> None:
    assert compare("output", "x", found, expected, 0.0, Rounding(1e-7)).agrees == agrees
