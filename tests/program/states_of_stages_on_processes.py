"""One rank of pipelines whose stages do not all train: FOLDER SITUATION makes every call that goes over states.

After each call the model and the optimizers are compared with plain PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft

torch.manual_seed(1)
B = {"x": torch.randn(8, 6).double(), "y": torch.randint(5, (8,))}
PAIR = weft.placement("cpu", [0, 1])


class Net(nn.Module):
    """A body and two heads, of which a task uses one; bare ones have no parameters."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(7, 5)
        if bare:
            self.b, self.c = nn.Softplus(), nn.Softplus()  # type: ignore[assignment]
        self.task = 0
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = (self.c if self.task else self.b)(torch.tanh(self.a(x)))
        return made


class HeavyBall(torch.optim.Optimizer):
    """Assigns its states, and counts in a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["m"] = 0.9 * state["m"] + p.grad if "m" in state else p.grad.clone()
                    state["n"] = state.get("n", 0) + 1
                    p.add_(state["m"], alpha=-group["lr"] / state["n"])


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


# Of each situation, the parameters that train, and the optimizer; all are given to it where it is torch's.
SITUATIONS: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "head": ("bc", adamw),
    "body": ("a", HeavyBall),
    "tasks": ("abc", HeavyBall),
    "added": ("bc", adamw),
    "no gradient": ("abc", adamw),
    "bare": ("a", adamw),
}


class Side:
    """A model and its optimizer, of weft or of plain PyTorch beside it."""

    def __init__(self, situation: str) -> None:
        torch.manual_seed(0)
        trained, make = SITUATIONS[situation]
        self.situation, self.model = situation, Net(situation == "bare")
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name[0] in trained)
        own = [p for n, p in self.model.named_parameters() if n[0] in trained or make is adamw]
        self.optimizer = make(own if situation != "added" else list(self.heads()))
        self.program: Any = None

    def heads(self) -> Any:
        return [*self.model.b.parameters(), *self.model.c.parameters()]

    def begin(self, number: int) -> Collection[str]:
        """What happens before a step; the parameters whose gradients are dropped in it."""
        self.model.task = number % 2 if self.situation == "tasks" else 0
        if self.situation == "added" and number == 1:
            self.model.a.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.model.a.parameters())})
        return ("a.weight", "a.bias") if self.situation == "no gradient" and not number else ()

    def drop(self, names: Collection[str]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in names:
                parameter.grad = None

    def plain(self, dropped: Collection[str] = ()) -> None:
        """A step of plain PyTorch."""
        loss(self.model, B).backward()  # type: ignore[no-untyped-call]
        self.drop(dropped)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def planned(self, dropped: Collection[str] = ()) -> None:
        """A step of the program."""
        self.program.step(B, update=not dropped)
        if dropped:
            self.drop(dropped)
            self.program.update()

    def compile(self, body: int) -> None:
        """Compile, with the body on this rank."""
        strategy = weft.Strategy(stages=stages(body), micro_batches=2)
        given = self.model, loss, self.optimizer, B
        self.program = weft.compile(*given, placement=PAIR, strategy=strategy)

    def whole(self) -> tuple[Any, Any]:
        if self.program is None:
            return self.model.state_dict(), self.optimizer.state_dict()["state"]
        states = self.program.full_optimizer_state_dict()["state"]
        return self.program.full_state_dict(), states


def stages(body: int) -> list[weft.Stage]:
    """The body on one rank, the heads on the other."""
    one, two = (weft.placement("cpu", [rank]) for rank in (body, 1 - body))
    return [weft.Stage(["a"], placement=one), weft.Stage(["b", "c"], placement=two)]


def main(folder: str, situation: str) -> None:
    ours, ref = Side(situation), Side(situation)
    ours.compile(0)

    def beside(call: str) -> None:
        found, expected = ours.whole(), ref.whole()
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-12, msg=lambda x: f"{call}: {x}"
        )

    for number in range(3):
        ours.planned(ours.begin(number))
        ref.plain(ref.begin(number))
    beside("steps")
    ours.program.verify(B)
    beside("verify")
    ours.program.save(folder)
    ours.program.step(B)
    ours.program.load(folder)
    beside("load")
    whole = ours.program.full_optimizer_state_dict()
    ours.optimizer.load_state_dict(whole)
    ours.program.step(B, update=False)
    ours.optimizer.step()
    ours.optimizer.zero_grad()
    ref.plain()
    beside("the user's step")
    ours.planned()
    ref.plain()
    ours.program.close()
    ours.compile(1)
    beside("compile again, with the stages on other ranks")
    ours.planned()
    ref.plain()
    ours.program.close()
    ours.program = None
    weft.release(ours.model, ours.optimizer)
    beside("release")
    ours.plain()
    ref.plain()
    beside("a plain step")


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), sys.argv[2])
