"""What users do around a step (checkpoints, hooks, shared modules, caches): equal to plain PyTorch, or refused."""

from __future__ import annotations

import copy
import inspect
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import weft
from single_device import assert_same_state, plain_training, whole_state
from weft.errors import CaptureError, UserError
from weft.ir.logical import Call

RANKS = 2


def batches(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(count)]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).square().mean()
    return result


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> weft.Program:
    ranks = weft.placement("cpu", list(range(RANKS)))
    return weft.compile(model, squares, optimizer, batches()[0], placement=ranks)


def check_equal(model: nn.Module) -> weft.Program:
    """Train a copy by plain PyTorch and `model` by weft: losses and final tensors, which are live, are equal."""
    expected, trained = plain_training(model, squares, batches(), make_optimizer=sgd)
    with weft.local_world(RANKS):
        compiled = program(model, sgd(model))
        found = [compiled.step(batch).item() for batch in batches()]
        state = compiled.full_state_dict()
        assert_same_state(whole_state(model), state, 0)
    assert found == pytest.approx(expected, rel=1e-12)
    for name, value in trained.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
    return compiled


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8))
        self.reentrant = reentrant
        self.checkpointed = True

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        if self.checkpointed:
            return self.last(checkpoint(self.body, x, use_reentrant=self.reentrant))
        return self.last(self.body(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_made_again_with_the_weights_of_the_step(reentrant: bool) -> None:
    compiled = check_equal(seeded(lambda: Checkpointed(reentrant)))
    again = [call for call in compiled.graph.of_kind(Call) if ".again" in str(call.outputs[0])]
    assert again, "the backward makes nothing again"


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_checkpoint_draws_the_same_numbers_again(reentrant: bool) -> None:
    losses = []
    for checkpointed in (True, False):
        model = seeded(lambda: Checkpointed(reentrant, 0.5))
        model.checkpointed = checkpointed
        with weft.local_world(RANKS):
            compiled = program(model, sgd(model))
            losses.append([compiled.step(batch).item() for batch in batches()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_reentrant_checkpoint_without_a_gradient_trains_nothing_inside() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(checkpoint(self.body, x, use_reentrant=True))

    check_equal(seeded(Frozen))


def test_a_backward_reads_the_weights_of_the_step() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: nn.Linear) -> torch.Tensor:
            ctx.module = module
            return x * module.bias.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * ctx.module.bias, None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.a(x)
            hidden.register_hook(lambda gradient: gradient * self.b.weight.detach()[0])
            return self.b(Scaled.apply(hidden, self.b))  # type: ignore[no-untyped-call]

    check_equal(seeded(Model))


def test_hooks_of_parameters_change_gradients() -> None:
    model = seeded(lambda: nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.weight.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[union-attr, operator]
    optimizer = sgd(plain)
    for batch in batches():
        optimizer.zero_grad()
        squares(plain, batch).backward()
        optimizer.step()
    with weft.local_world(RANKS):
        compiled = program(model, sgd(model))
        for batch in batches():
            compiled.step(batch)
        torch.testing.assert_close(compiled.full_state_dict()["weight"], plain.weight.detach())


@pytest.mark.parametrize("kind", ["sequence", "alias", "tied"])
def test_modules_with_two_names(kind: str) -> None:
    def make() -> nn.Module:
        one, other = nn.Linear(8, 8), nn.Linear(8, 8)
        model = nn.Sequential(one, nn.Tanh(), one if kind == "sequence" else other)
        if kind == "alias":
            model[1].alias = one  # type: ignore[assignment]
        if kind == "tied":
            other.weight = one.weight
        return model

    model = seeded(make)
    before = dict(model.named_parameters(remove_duplicate=False))
    check_equal(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is each for name, each in before.items())
    assert all(isinstance(each, nn.Parameter) for each in after.values())


class Remembering(nn.Module):
    """Replaces a buffer, caches a tensor, counts in a list."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.cache: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if self.cache is None:
            self.cache = torch.arange(8, dtype=x.dtype)
        self.seen.append(hidden)
        return hidden * self.mean + self.cache


def test_buffers_that_are_replaced_and_caches() -> None:
    model = seeded(Remembering)
    assert isinstance(model, Remembering)
    mean = model.mean
    check_equal(model)
    assert model.cache is None
    assert model.seen == []
    assert model.mean is mean


class Recurrent(nn.Module):
    """Carries its last hidden values, and those before, from step to step, as in truncated backpropagation."""

    last: torch.Tensor
    before: torch.Tensor

    def __init__(self, last_first: bool) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        for name in ("last", "before") if last_first else ("before", "last"):
            self.register_buffer(name, torch.full((8, 8), 0.5 if name == "last" else 0.25))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.cell(x, self.last) * self.before
        self.before, self.last = self.last, hidden.detach()
        return hidden


@pytest.mark.parametrize("last_first", [False, True])
def test_a_buffer_is_replaced_whose_old_values_the_backward_needs(last_first: bool) -> None:
    check_equal(seeded(lambda: Recurrent(last_first)))


class Swapping(nn.Module):
    """Buffers that take each other's place."""

    one: torch.Tensor
    two: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("one", torch.ones(8))
        self.register_buffer("two", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> Any:
        self.one, self.two = self.two, self.one
        return self.layer(x) * self.one


def test_buffers_that_take_each_others_place() -> None:
    check_equal(seeded(Swapping))


def test_what_a_replaced_buffer_was_is_returned_as_it_was() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        before = model.last
        return {"loss": squares(model, batch), "before": before}

    model = seeded(lambda: Recurrent(True))
    with weft.local_world(RANKS):
        ranks = weft.placement("cpu", list(range(RANKS)))
        compiled = weft.compile(model, loss_fn, sgd(model), batches()[0], placement=ranks)
        compiled.verify(batches()[0])
        for batch in batches()[:2]:
            expected = whole_state(model)["last"].clone()
            torch.testing.assert_close(compiled.step(batch)["before"], expected, rtol=0, atol=0)


class Masked(nn.Module):
    """torch's transformer with a mask that it is not told to be causal."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> Any:
        x = x.view(2, 4, 8)
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
        mask = mask if self.causal else mask.flip(0, 1)
        return self.net(x, x.flip(1), src_mask=mask, tgt_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_transformers_that_are_not_told_to_be_causal(causal: bool) -> None:
    check_equal(seeded(lambda: Masked(causal)))


def test_closures_and_globals_get_back_what_they_held() -> None:
    model, losses, last = seeded(lambda: nn.Linear(8, 8)), [torch.zeros(())], None

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = squares(model, batch)
        losses.append(last)
        return last

    with weft.local_world(RANKS):
        ranks = weft.placement("cpu", list(range(RANKS)))
        weft.compile(model, loss_fn, sgd(model), batches()[0], placement=ranks)
    assert last is None
    assert len(losses) == 1


def test_a_tensor_of_the_model_that_the_loss_function_holds() -> None:
    model = seeded(lambda: nn.Linear(8, 8))
    plain = copy.deepcopy(model)

    def decayed(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda model, batch: squares(model, batch) + torch.stack([weight, weight]).sum()

    plain_loss, optimizer = decayed(plain.weight), sgd(plain)  # type: ignore[arg-type]
    for batch in batches():
        optimizer.zero_grad()
        plain_loss(plain, batch).backward()
        optimizer.step()
    with weft.local_world(RANKS):
        ranks = weft.placement("cpu", list(range(RANKS)))
        loss_fn = decayed(model.weight)  # type: ignore[arg-type]
        compiled = weft.compile(model, loss_fn, sgd(model), batches()[0], placement=ranks)
        for batch in batches():
            compiled.step(batch)
        torch.testing.assert_close(compiled.full_state_dict()["weight"], plain.weight.detach())


def refused(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with weft.local_world(RANKS), pytest.raises(CaptureError) as caught:
        program(model, optimizer)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value)


def test_hooks_that_a_step_cannot_call_are_refused() -> None:
    model = seeded(lambda: nn.Linear(8, 8))
    model.weight.register_post_accumulate_grad_hook(print)  # type: ignore[union-attr, operator]
    assert "weight has the hook print" in refused(model, sgd(model))
    model = seeded(lambda: nn.Linear(8, 8))
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "register_step_pre_hook" in refused(model, optimizer)


class NormOfAll(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.norm().item() ** 2 for p in every) ** 0.5
        with torch.no_grad():
            for p in every:
                p -= 0.1 * p.grad / norm


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> None:
        self.base.step()


class OverItsOwnList(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        self.own = list(parameters)
        super().__init__(self.own, lr=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: NormOfAll(model.parameters(), lr=0.1), "depends on the gradients of others"),
        (lambda model: Lookahead(sgd(model)), "holds another optimizer in its attribute 'base'"),
        (lambda model: OverItsOwnList(model.parameters()), "holds parameters in its attribute"),
    ],
)
def test_optimizers_that_look_at_several_parameters_are_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], words: str
) -> None:
    model = seeded(lambda: nn.Linear(8, 8))
    assert words in refused(model, make(model))


def test_a_parameter_that_the_step_replaces_is_refused() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            self.layer.weight = nn.Parameter(self.layer.weight * 2)
            return self.layer(x)

    model = seeded(Replacing)
    assert "layer.weight: it is a parameter" in refused(model, sgd(model))


def test_a_buffer_of_another_shape_is_refused() -> None:
    class Growing(nn.Module):
        past: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("past", torch.zeros(1, 8))

        def forward(self, x: torch.Tensor) -> Any:
            self.past = torch.cat([self.past, x])
            return self.layer(x)

    model = seeded(Growing)
    assert "past: it was float64[1, 8] and is float64[9, 8]" in refused(model, sgd(model))


class Unused(nn.Module):
    """One layer is frozen, one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.layer, self.unused = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.frozen(x))


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
def test_adagrad_with_parameters_that_are_not_updated(strategy: str) -> None:
    model = seeded(Unused)
    zero = weft.Zero(1) if strategy == "zero1" else None

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.1)

    _, trained = plain_training(model, squares, batches(), make_optimizer=adagrad)
    with weft.local_world(RANKS):
        compiled = weft.compile(
            model,
            squares,
            adagrad(model),
            batches()[0],
            placement=weft.placement("cpu", [0, 1]),
            strategy=replace(weft.data_parallel(), zero=zero),
        )
        for batch in batches():
            compiled.step(batch)
        state = compiled.full_state_dict()
    for name, value in trained.items():
        torch.testing.assert_close(state[name], value)


def wrapped(kind: str, model: nn.Module) -> Any:
    if kind == "compiled":
        return torch.compile(model)
    if kind == "parallel":
        return nn.DataParallel(model)
    if kind == "inside":
        return nn.Sequential(torch.compile(model), nn.Tanh())  # type: ignore[call-overload]
    return model


@pytest.mark.parametrize("kind", ["compiled", "parallel", "inside"])
def test_wrappers_are_looked_through(kind: str) -> None:
    inner = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    plain = nn.Sequential(inner, nn.Tanh()) if kind == "inside" else inner
    expected, _ = plain_training(plain, squares, batches(), make_optimizer=sgd)
    model = wrapped(kind, inner)
    with weft.local_world(RANKS):
        compiled = program(model, sgd(model))
        found = [compiled.step(batch).item() for batch in batches()]
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_closed_program_does_not_step() -> None:
    with weft.local_world(RANKS):
        compiled = program(model := seeded(lambda: nn.Linear(8, 8)), sgd(model))
        compiled.step(batches()[0])
        compiled.close()
        with pytest.raises(UserError, match="was closed, and cannot step"):
            compiled.step(batches()[0])
        with pytest.raises(UserError, match="was closed, and cannot save"):
            compiled.save("nowhere")
        assert compiled.full_state_dict().keys() == {"weight", "bias"}


# Methods of a program that work with its ranks, as a thread or a forked process would call them.
CALLS: dict[str, Callable[[weft.Program], object]] = {
    "step": lambda made: made.step(batches()[0]),
    "update": lambda made: made.update(),
    "verify": lambda made: made.verify(batches()[0]),
    "evaluation": lambda made: made.evaluation(squares, batches()[0]),
    "full_state_dict": lambda made: made.full_state_dict(),
    "load_full_state_dict": lambda made: made.load_full_state_dict({}),
    "full_optimizer_state_dict": lambda made: made.full_optimizer_state_dict(),
    "save": lambda made: made.save("nowhere"),
    "load": lambda made: made.load("nowhere"),
    "wait_for_saved": lambda made: made.wait_for_saved(),
    "trace": lambda made: made.trace(),
    "report": lambda made: made.report("nowhere.html"),
    "close": lambda made: made.close(),
    "_exchange": lambda made: made._exchange(""),
}
# Those that look at what this process has.
LOOKING = {"stored", "rows", "explain", "memory", "recording"}
# That makes steps, which are told apart themselves.
STEPPING = {"run"}


def test_every_method_of_a_program_is_told_apart() -> None:
    methods = dict(inspect.getmembers(weft.Program, inspect.isfunction))
    assert {name for name in methods if name[0] != "_"} == {*CALLS, *LOOKING, *STEPPING} - {
        "_exchange"
    }


def told_in(work: Callable[[], object]) -> str:
    """What a thread is told for a call."""
    told: list[str] = []

    def call() -> None:
        try:
            work()
        except UserError as error:
            told.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    return "".join(told)


def test_a_program_works_in_one_thread_at_a_time() -> None:
    with weft.local_world(RANKS):
        compiled = program(model := seeded(lambda: nn.Linear(8, 8)), sgd(model))
        other = program(second := seeded(lambda: nn.Linear(8, 8)), sgd(second))
        compiled.step(batches()[0])
        with compiled.working:
            for name, call in CALLS.items():
                words = f"program.{name.lstrip('_')} was called while another thread works"
                assert words in told_in(lambda call=call: call(compiled))  # type: ignore[misc]
            assert "program.step was called" in told_in(lambda: other.step(batches()[0]))
            assert "weft.compile was called" in told_in(lambda: program(model, sgd(model)))
        compiled.step(batches()[0])
        other.step(batches()[0])


def test_programs_of_one_rank_work_in_several_threads() -> None:
    with weft.local_world(1):
        every = []
        for _ in range(2):
            model = seeded(lambda: nn.Linear(8, 8))
            ranks = weft.placement("cpu", [0])
            every.append(weft.compile(model, squares, sgd(model), batches()[0], placement=ranks))
        with every[0].working:
            assert told_in(lambda: every[0].step(batches()[0]))
            assert not told_in(lambda: every[1].step(batches()[0]))
            assert every[1].steps == 1


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_is_told_that_the_ranks_live_elsewhere() -> None:
    with weft.local_world(RANKS) as world:
        compiled = program(model := seeded(lambda: nn.Linear(8, 8)), sgd(model))
        compiled.step(batches()[0])
        calls = [
            *(partial(call, compiled) for call in CALLS.values()),
            lambda: world.run(lambda rank: rank),
            lambda: program(model, sgd(model)),
            lambda: weft.release(model),
        ]
        with compiled.working:  # as where another thread forks
            child = os.fork()
        if not child:
            signal.alarm(60)
            try:
                for call in calls:
                    with pytest.raises(
                        UserError, match="was forked from the one that has the ranks"
                    ):
                        call()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        compiled.step(batches()[0])


def test_modules_of_dtensors_are_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = seeded(lambda: nn.Linear(8, 8))
        weight = distribute_tensor(model.weight.detach(), mesh, [Replicate()])  # type: ignore[arg-type, operator]
        model.weight = nn.Parameter(weight)
        with pytest.raises(UserError, match="weight as a DTensor, as fully_shard"):
            weft.Step(model, squares, None, batches()[0])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("where", ["compile", "step", "update", "verify"])
@pytest.mark.parametrize("mode", ["autocast", "inference"])
def test_modes_that_would_do_nothing_or_break_a_step_are_refused(where: str, mode: str) -> None:
    model, (batch, *_) = seeded(lambda: nn.Linear(8, 8)), batches()
    optimizer = sgd(model)
    inside: Any = torch.inference_mode()
    words = r"in torch\.inference_mode\(\): it trains"
    if mode == "autocast":
        inside, words = torch.autocast("cpu", torch.bfloat16), r"Strategy\(precision='bf16'\)"
    with weft.local_world(RANKS):
        if where == "compile":
            with inside, pytest.raises(UserError, match=words):
                program(model, optimizer)
        made = program(model, optimizer)
        made.step(batch, update=False)
        calls = {"step": made.step, "update": lambda _: made.update(), "verify": made.verify}
        before = [whole.clone() for whole in made.full_state_dict().values()]
        if where in calls:
            with inside, pytest.raises(UserError, match=words):
                calls[where](batch)
        for kept, now in zip(before, made.full_state_dict().values(), strict=True):
            assert torch.equal(kept, now)
        made.update()
        made.close()


def test_modes_that_may_be_around_a_step() -> None:
    """No gradients, the strategy's own autocast, and for evaluation inference mode."""
    model, (batch, *_) = seeded(lambda: nn.Linear(8, 8)).float(), batches()
    batch, bf16 = batch.float(), weft.Strategy(precision="bf16")
    plain, optimizer = copy.deepcopy(model), sgd(model)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, x)

    expected = loss_fn(plain, batch).item()
    ranks = weft.placement("cpu", list(range(RANKS)))
    with weft.local_world(RANKS):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            made = weft.compile(model, squares, optimizer, batch, placement=ranks, strategy=bf16)
            assert made.step(batch).item() == pytest.approx(expected, rel=1e-2)
        evaluation = made.evaluation(squares, batch)
        with torch.inference_mode():
            again = evaluation.step(batch).item()
        assert again == evaluation.step(batch).item() < expected
        made.close()
