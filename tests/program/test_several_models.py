"""Several programs over live models in one loop, and models of which a part is frozen, beside plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div

import weft
from weft.ir.logical import Input, Update
from weft.ir.plan import Collective, Communicate

pytestmark = pytest.mark.usefixtures("double_precision")
SPLIT = {"*": weft.split(0)}
STRATEGIES = {
    "data": weft.Strategy(batch=SPLIT),
    "zero 1": weft.Strategy(batch=SPLIT, zero=weft.Zero(1)),
    "zero 3": weft.Strategy(batch=SPLIT, zero=weft.Zero(3)),
    "micro-batches": weft.Strategy(batch=SPLIT, micro_batches=2),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
PLACE = [0, 1, 2]


class Gan(nn.Module):
    """A generator and a discriminator, each trained by a program of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(), nn.Linear(12, 1))


def discriminator_loss(gan: Gan, batch: dict[str, Tensor]) -> Tensor:
    real = gan.discriminator(batch["real"])
    made = gan.discriminator(gan.generator(batch["noise"]).detach())
    return binary_cross_entropy_with_logits(
        real, torch.ones_like(real)
    ) + binary_cross_entropy_with_logits(made, torch.zeros_like(made))


def generator_loss(gan: Gan, batch: dict[str, Tensor]) -> Tensor:
    made = gan.discriminator(gan.generator(batch["noise"]))
    return binary_cross_entropy_with_logits(made, torch.ones_like(made))


def gan_batch(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "real": torch.randn(12, 6, generator=drawn) + 1,
        "noise": torch.randn(12, 4, generator=drawn),
    }


def optimizers(gan: Gan) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(part.parameters(), lr=0.05, eps=1e-4, betas=(0.5, 0.9))
        for part in (gan.discriminator, gan.generator)
    ]


@every_strategy
def test_two_sides_train_each_other(strategy: weft.Strategy) -> None:
    torch.manual_seed(0)
    gan = Gan()
    plain, losses = copy.deepcopy(gan), (discriminator_loss, generator_loss)
    own, others = optimizers(gan), optimizers(plain)
    with weft.local_world(len(PLACE)):
        programs = [
            weft.compile(
                *(gan, loss, optimizer, gan_batch(0)),
                placement=weft.placement("cpu", PLACE),
                strategy=strategy,
            )
            for loss, optimizer in zip(losses, own, strict=True)
        ]
        for step in range(4):
            batch = gan_batch(step)
            for program, loss_fn, optimizer in zip(programs, losses, others, strict=True):
                plain.zero_grad()
                loss = loss_fn(plain, batch)
                loss.backward()
                optimizer.step()
                assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-9)
        state = programs[0].full_state_dict()
        for program in programs:
            program.close()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)


class Distilled(nn.Module):
    """A teacher that stays as it is, and a student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))
        self.teacher.requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 5))


def distilled_loss(model: Distilled, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        target = model.teacher(batch["x"]).softmax(-1)
    found = model.student(batch["x"])
    return kl_div(found.log_softmax(-1), target, reduction="batchmean") + cross_entropy(
        found, batch["y"]
    )


class Adapted(nn.Module):
    """LoRA: a frozen layer, and what is added to it by two narrow ones."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + x @ self.down.T @ self.up.T
        return found


def adapted() -> nn.Module:
    return nn.Sequential(
        Adapted(nn.Linear(8, 32)), nn.GELU(), Adapted(nn.Linear(32, 32)), nn.Linear(32, 5)
    )


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def labelled(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(12, 8, generator=drawn),
        "y": torch.randint(5, (12,), generator=drawn),
    }


@every_strategy
@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [(Distilled, distilled_loss), (adapted, class_loss)],
    ids=["student", "LoRA"],
)
def test_what_is_frozen_costs_nothing(
    make: Callable[[], nn.Module], loss_fn: Any, strategy: weft.Strategy
) -> None:
    """No gradient, no state, no reduction; and the rest trains as with plain PyTorch."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    trained = [each for each in model.parameters() if each.requires_grad]
    own = torch.optim.AdamW(trained, lr=0.05, eps=1e-4)
    other = torch.optim.AdamW([x for x in plain.parameters() if x.requires_grad], lr=0.05, eps=1e-4)
    with weft.local_world(len(PLACE)):
        program = weft.compile(
            *(model, loss_fn, own, labelled(0)),
            placement=weft.placement("cpu", PLACE),
            strategy=strategy,
        )
        for step in range(3):
            batch = labelled(step)
            other.zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            other.step()
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-9)
        state, graph, plan = program.full_state_dict(), program.graph, program.plan
        program.close()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
    assert not any(node.target.name.startswith(tuple(frozen)) for node in graph.of_kind(Update))
    states = {node.key for node in graph.of_kind(Input) if node.role == "state"}
    assert not any(key.startswith(f"{name}.") for key in states for name in frozen)
    reduced = sum(
        each.bytes
        for actor in plan.ranks[0].actors
        if isinstance(actor, Communicate)
        for each in actor.collectives
        if isinstance(each, Collective) and each.kind in ("all_reduce", "reduce_scatter")
    )
    # All ranks together send each gradient twice at most, but for one rank's part; and some numbers of the loss.
    most = sum(each.numel() * each.element_size() for each in trained)
    assert reduced <= 2 * (len(PLACE) - 1) * (most + 1000)
