"""Several optimizers in one step, each with parameters of its own, train as they do in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, token_batch, token_loss
from weft.capture.optimizer_groups import Optimizers as Several
from weft.errors import CaptureError, UserError

pytestmark = pytest.mark.usefixtures("double_precision")

S0 = weft.split(0)
STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "data": (
        [0, 1],
        weft.Strategy(batch={"*": S0}, parameters={"*": weft.broadcast}, clip_norm=0.1),
    ),
    "ZeRO 3": ([0, 1], weft.Strategy(batch={"*": S0}, zero=weft.Zero(3), clip_norm=0.1)),
    "pipeline": (
        [[0, 1], [2, 3]],
        weft.Strategy(batch={"*": S0}, stages=2, micro_batches=2, zero=weft.Zero(1), clip_norm=0.1),
    ),
}
Optimizers = list[torch.optim.Optimizer]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside the blocks, and everything else."""
    named = dict(model.named_parameters())
    inside = {name for name, x in named.items() if name.startswith("blocks") and x.dim() == 2}
    matrices = [named[name] for name in named if name in inside]
    return matrices, [named[name] for name in named if name not in inside]


def muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices, rest = split_parameters(model)
    groups = [{"params": rest[:3]}, {"params": rest[3:], "lr": 0.004}]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=0.01)]


def two_adams(model: nn.Module) -> Optimizers:
    """Of one class, with other hyperparameters."""
    matrices, rest = split_parameters(model)
    groups = [{"params": matrices[:2]}, {"params": matrices[2:], "lr": 0.02}]
    return [torch.optim.AdamW(groups, lr=0.01), torch.optim.AdamW(rest, lr=0.002, betas=(0.5, 0.9))]


def schedulers(optimizers: Optimizers) -> list[torch.optim.lr_scheduler.StepLR]:
    gammas = (0.5, 0.8)
    return [
        torch.optim.lr_scheduler.StepLR(one, 1, gamma)
        for one, gamma in zip(optimizers, gammas, strict=True)
    ]


BATCHES = [token_batch(8, seed=seed) for seed in range(4)]


def plain_losses(model: nn.Module, optimizers: Optimizers) -> tuple[list[float], list[float]]:
    """Losses and norms of four steps, clipped all together."""
    losses, norms, planned = [], [], schedulers(optimizers)
    for batch in BATCHES:
        loss = token_loss(model, batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        every: list[Any] = [*optimizers, *planned]
        for each in every:
            each.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses, norms


def whole(value: Any) -> Any:
    return value.full() if isinstance(value, weft.GlobalTensor) else value


def assert_same_states(found: Optimizers, expected: Optimizers) -> None:
    for one, plain in zip(found, expected, strict=True):
        assert len(one.state) == len(plain.state) > 0
        for own, wanted in zip(one.param_groups, plain.param_groups, strict=True):
            for mine, theirs in zip(own["params"], wanted["params"], strict=True):
                assert one.state[mine].keys() == plain.state[theirs].keys()
                for name, value in plain.state[theirs].items():
                    own_value = whole(one.state[mine][name])
                    # Fused kernels count steps in float32.
                    torch.testing.assert_close(
                        own_value, value, rtol=1e-8, atol=1e-8, check_dtype=name != "step"
                    )


def compiled(model: nn.Module, optimizers: Any, name: str, **told: Any) -> weft.Program:
    grid, strategy = STRATEGIES[name]
    return weft.compile(
        model, token_loss, optimizers, BATCHES[0],
        placement=weft.placement("cpu", grid), strategy=strategy, **told,
    )  # fmt: skip


def world(name: str) -> Any:
    return weft.local_world(torch.tensor(STRATEGIES[name][0]).numel(), timeout=60)


@pytest.mark.parametrize("make", [muon_and_adamw, two_adams])
@pytest.mark.parametrize("name", STRATEGIES)
def test_trains_as_plain_pytorch(name: str, make: Callable[[nn.Module], Optimizers]) -> None:
    torch.manual_seed(0)
    model = GPT(layers=2)
    plain = copy.deepcopy(model)
    reference, own = make(plain), make(model)
    losses, norms = plain_losses(plain, reference)
    with world(name):
        program, planned = compiled(model, own, name, metrics=["grad_norm"]), schedulers(own)
        program.verify(BATCHES[0])
        for batch, loss, norm in zip(BATCHES, losses, norms, strict=True):
            assert float(program.step(batch)) == pytest.approx(loss, rel=1e-9)
            assert float(program.metrics["grad_norm"]) == pytest.approx(norm, rel=1e-9)
            for each in planned:
                each.step()
        state = program.full_state_dict()
        assert_same_states(own, reference)
        program.verify(BATCHES[0])
        assert program.graph.name in repr(program)
        assert all(type(each).__name__ in repr(program) for each in own)
        program.close()
        weft.release(model, own)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-8, atol=1e-8)
    kept = (x for one in own for state in one.state.values() for x in state.values())
    assert not any(isinstance(x, weft.GlobalTensor) for x in kept)


def test_gradients_that_stay_are_updated_by_all() -> None:
    torch.manual_seed(0)
    model = GPT(layers=1)
    plain = copy.deepcopy(model)
    reference, own = muon_and_adamw(plain), muon_and_adamw(model)
    for _ in range(2):
        for batch in BATCHES[:2]:
            token_loss(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for each in reference:
            each.step()
        plain.zero_grad()
    with world("data"):
        program = compiled(model, tuple(own), "data")
        for _ in range(2):
            for batch in BATCHES[:2]:
                program.step(batch, update=False)
            program.update()
        state = program.full_state_dict()
        assert_same_states(own, reference)
        program.close()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-8, atol=1e-8)


def test_each_loads_its_own_states_and_takes_groups() -> None:
    """What both have saved goes on in a second program; a group that is added later renumbers none."""
    torch.manual_seed(0)
    model = GPT(layers=1)
    head = model.head.weight
    plain = copy.deepcopy(model)

    def make(model: Any) -> Optimizers:
        first, second = two_adams(model)
        second.param_groups[0]["params"] = [
            x for x in second.param_groups[0]["params"] if x is not model.head.weight
        ]
        return [first, second]

    reference, own = make(plain), make(model)
    again = copy.deepcopy(model)
    with world("data"):
        program = compiled(model, own, "data")
        program.step(BATCHES[0])
        saved = [copy.deepcopy(one.state_dict()) for one in own]
        weights = program.full_state_dict()
        own[0].add_param_group({"params": [head], "lr": 0.1})
        program.step(BATCHES[1])
        program.step(BATCHES[2], update=False)
        program.update()
        found = program.full_state_dict()
        program.close()
        later = make(again)
        program = compiled(again, later, "data")
        program.load_full_state_dict(weights)
        for one, state in zip(later, saved, strict=True):
            one.load_state_dict(state)
        later[0].add_param_group({"params": [again.head.weight], "lr": 0.1})
        program.step(BATCHES[1])
        program.step(BATCHES[2])
        others = program.full_state_dict()
        program.close()
    for number, batch in enumerate(BATCHES[:3]):
        if number == 1:
            reference[0].add_param_group({"params": [plain.head.weight], "lr": 0.1})
        plain.zero_grad()
        token_loss(plain, batch).backward()
        own_parameters = [
            x for one in reference for group in one.param_groups for x in group["params"]
        ]
        nn.utils.clip_grad_norm_(own_parameters, 0.1)
        for each in reference:
            each.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(others[key], value, rtol=1e-8, atol=1e-8)


def test_a_parameter_that_moves_to_another_optimizer_begins_anew() -> None:
    torch.manual_seed(0)
    model = GPT(layers=1)
    plain = copy.deepcopy(model)
    reference, own = two_adams(plain), two_adams(model)

    def move(optimizers: Optimizers) -> None:
        first, second = optimizers
        moved = first.param_groups[0]["params"].pop()
        second.add_param_group({"params": [moved], "lr": 0.05})

    with world("data"):
        program = compiled(model, own, "data")
        for number, batch in enumerate(BATCHES):
            if number == 2:
                move(own)
                move(reference)
            # Any change lets every optimizer look at what it holds.
            own[0].state.update({x: dict(entries) for x, entries in own[0].state.items()})
            program.step(batch)
            plain.zero_grad()
            token_loss(plain, batch).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            for each in reference:
                each.step()
        found = program.full_state_dict()
        program.close()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-8)


def test_refused() -> None:
    model = GPT(layers=1)
    muon, adamw = muon_and_adamw(model)
    name, shared = next(iter(model.named_parameters()))
    with world("data"):
        with pytest.raises(
            CaptureError,
            match=rf"{name} is in parameter group 0 of optimizer 1 \(AdamW\) and in parameter group 0 of optimizer 2",
        ):
            compiled(model, [muon, adamw, torch.optim.SGD([shared])], "data")
        for given in ([], [muon, None], "adamw"):
            with pytest.raises(
                UserError, match="optimizer= must be a torch.optim.Optimizer, a list"
            ):
                compiled(model, given, "data")


def test_groups_keep_their_numbers() -> None:
    model = nn.ParameterList([torch.zeros(1) for _ in range(4)])
    first, second = torch.optim.SGD([model[0]]), torch.optim.SGD([model[1]])
    every = Several((first, second))
    before = [number for _, number, _ in every.groups()]
    first.add_param_group({"params": [model[2]]})
    assert before == [0, 1]
    assert [number for _, number, _ in every.groups()] == [0, 2, 1]
    assert every.place(1) == (second, 0)
    assert every.place(2) == (first, 1)
