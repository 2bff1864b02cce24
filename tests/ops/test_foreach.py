"""Ops on lists of tensors: each tensor keeps its layout, and nothing is gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.boxing import steps
from weft.capture import capture
from weft.errors import CaptureError
from weft.ir.logical import Box
from weft.tensor import boxing
from weft.tensor.dispatch import recipe
from weft.units import ITEM_SIZE

S, B = weft.split, weft.broadcast
aten: Any = torch.ops.aten


class Weights(nn.Module):
    """Two weights of different shapes, each with states like an optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("a", (8, 6)), ("b", (4,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
            for state in ("first", "second"):
                self.register_buffer(f"{name}_{state}", torch.rand(shape, dtype=torch.float64))

    def lists(self, *names: str) -> list[list[Tensor]]:
        return [[getattr(self, f"{key}_{name}") for key in "ab"] for name in names]


def element_wise(model: Weights, batch: Any) -> Tensor:
    """A little of everything that optimizers do with lists."""
    xs: list[Tensor] = [model.a, model.b]
    ys = torch._foreach_mul(xs, 2.0)
    ys = torch._foreach_add(ys, xs, alpha=-0.5)
    ys = torch._foreach_addcmul(ys, xs, ys, 0.1)
    roots = torch._foreach_sqrt(torch._foreach_add(torch._foreach_mul(xs, xs), 1.0))
    ys = torch._foreach_addcdiv(ys, xs, roots, [0.2, 0.3])
    ys = torch._foreach_lerp(ys, xs, 0.25)
    ys = torch._foreach_neg(torch._foreach_maximum(ys, torch._foreach_div(xs, roots)))
    zs = [torch.zeros_like(x) for x in xs]
    torch._foreach_add_(zs, ys)
    torch._foreach_addcmul_(zs, ys, ys, value=-1)
    torch._foreach_clamp_min_(zs, -3.0)
    torch._foreach_pow_(zs, 3)
    return sum((z.sum() for z in zs), batch["x"].sum())


def averaged(model: Weights, batch: Any) -> Tensor:
    """Averages of weights, kept in buffers, in place."""
    with torch.no_grad():
        torch._foreach_lerp_(model.lists("first")[0], [model.a, model.b], 0.1)
        torch._foreach_mul_(model.lists("second")[0], [2.0, 3.0])
    return (model.a * model.a_first).sum() + (model.b * model.b_second).sum() + batch["x"].sum()


def clipped(model: Weights, batch: Any) -> Tensor:
    """An update with clipped gradients, as a user writes it inside the step."""
    loss = (model.a**4).sum() + (model.b**2).sum() + batch["x"].sum()
    found = torch.autograd.grad(loss, [model.a, model.b], retain_graph=True)
    with torch.no_grad():
        norm = torch.stack(torch._foreach_norm(found)).norm()
        torch._foreach_mul_(found, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_copy_(model.lists("first")[0], found)
    return loss + torch.stack(torch._foreach_norm([model.a, model.b], 1)).sum()


STEPS: dict[str, Callable[[Weights, Any], Tensor]] = {
    "element-wise": element_wise,
    "in place": averaged,
    "clipping": clipped,
}
EVERYTHING = weft.Strategy(batch={"*": B}, parameters={"*": S(0)})


def moved(program: Any) -> dict[tuple[int, ...], int]:
    """Bytes that the boxing of a step moves, by the shape of what is moved."""
    found: dict[tuple[int, ...], int] = {}
    for node in program.graph.of_kind(Box):
        source = program.graph.values[node.input.name]
        chain = steps(source.layout, node.output.layout, source.shape, ITEM_SIZE[source.dtype])
        found[source.shape] = found.get(source.shape, 0) + sum(step.bytes for step in chain)
    return {shape: size for shape, size in found.items() if size}


@pytest.mark.parametrize("name", STEPS)
def test_steps_with_lists_equal_one_device_and_gather_nothing(name: str) -> None:
    torch.manual_seed(0)
    model, loss_fn = Weights(), STEPS[name]
    plain = copy.deepcopy(model)
    batch = {"x": torch.zeros(4, dtype=torch.float64)}
    reference = torch.optim.SGD(plain.parameters(), lr=0.01)
    with weft.local_world(4):
        program = weft.compile(
            model,
            loss_fn,
            torch.optim.SGD(model.parameters(), lr=0.01),
            batch,
            placement=weft.placement("cpu", [0, 1, 2, 3]),
            strategy=EVERYTHING,
        )
        for _ in range(3):
            reference.zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            reference.step()
            torch.testing.assert_close(program.step(batch), loss.detach())
        state = program.full_state_dict()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, msg=key, rtol=1e-10, atol=1e-10)
    assert set(moved(program)) <= {()}  # sums of whole tensors; no tensor itself


def test_an_op_of_a_fused_optimizer_in_the_step_is_refused() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        parameters = [torch.zeros(4)]
        torch.ops.aten._fused_sgd_(
            *(parameters, [batch], [torch.zeros(4)]),
            weight_decay=0.0,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )
        return (model(batch) * parameters[0]).sum()

    with pytest.raises(CaptureError, match="op of a fused optimizer.*fused=False"):
        capture(nn.Linear(4, 4), loss_fn, None, torch.ones(4), training=False)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=True, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eager_optimizers_move_nothing_and_clipping_sums_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, seen = torch.randn(8, 6, dtype=torch.float64), []
    placement = weft.placement("cpu", [0, 1, 2, 3])
    for module in (boxing, recipe):
        monkeypatch.setattr(module, "check_strict", lambda moved, *_: seen.append(moved))
    with weft.local_world(4):
        patterns = {"0.*": S(0), "2.weight": S(1), "2.bias": B}
        model = weft.distribute(copy.deepcopy(plain), placement, patterns)
        ours, theirs = (OPTIMIZERS[name](one.parameters()) for one in (model, plain))
        for _ in range(3):
            for one, batch in ((model, weft.tensor(x, placement=placement, sbp=B)), (plain, x)):
                one.zero_grad()
                one(batch).square().sum().backward()
            seen.clear()
            clipped = [
                nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True) for m in (model, plain)
            ]
            assert max(seen) <= 2 * 3 * 4 * 8  # the norms, all of them at once at most
            torch.testing.assert_close(clipped[0].full(), clipped[1])  # type: ignore[attr-defined]
            seen.clear()
            ours.step()
            assert not any(seen)
            theirs.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.full(), other, rtol=1e-10, atol=1e-10)
