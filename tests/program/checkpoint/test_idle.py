"""States of parameters that no plan updates when a checkpoint is loaded: they are there when one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import weft
from program.checkpoint.nets import assert_same, everything

STEPS, CUT = 6, 4


class Heads(nn.Module):
    """A trunk and two heads, of which a step trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 9)
        self.one, self.two = nn.Linear(9, 4), nn.Linear(9, 4)
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return self.one(hidden) if self.task == 0 else self.two(hidden)


class Dotted(torch.optim.Optimizer):
    """A momentum whose state has a dot in its name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean.first"] = torch.zeros_like(parameter)
                state["mean.first"].mul_(0.9).add_(parameter.grad)
                parameter.add_(state["mean.first"], alpha=-group["lr"])


def batch_of(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 4, (8,), generator=generator)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def in_turns(model: Heads, step: int) -> None:
    model.task = step % 2


def thawed(model: Heads, step: int) -> None:
    """The trunk is frozen at first."""
    model.trunk.requires_grad_(step > 1)


def frozen_for_a_while(model: Heads, step: int) -> None:
    """Other plans than at first while it is saved, and while the run goes on."""
    model.trunk.requires_grad_(step in (0, 1, STEPS - 1))
    model.task = int(step > 0)


def trained(
    change: Any,
    make: Any,
    ranks: int,
    entries: dict[str, Any],
    path: Path,
    goes_on: bool,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    torch.manual_seed(int(goes_on))
    model = Heads().to(dtype)
    change(model, 0)
    optimizer = make(model.parameters())
    with weft.local_world(ranks):
        program = weft.compile(
            *(model, loss_fn, optimizer, batch_of(0, dtype)),
            placement=weft.placement("cpu", list(range(ranks))),
            strategy=weft.Strategy(batch={"*": weft.split(0)}, **entries),
        )
        if goes_on:
            again = path / "again"
            program.load(again if again.exists() else path / "saved")
        assert program.steps == (CUT if goes_on else 0)
        for step in range(program.steps, STEPS):
            change(model, step)
            program.step(batch_of(step, dtype))
            if step == CUT - 1:
                program.save(path / "saved")
        found = everything(program)
        found |= {f"master.{n}": x for n, x in program.full_state_dict(masters=True).items()}
        program.close()
    return found


THOROUGH = pytest.mark.thorough
WIDE, NARROW = (2, {"zero": weft.Zero(3)}), (3, {"zero": weft.Zero(1)})


@pytest.mark.parametrize(
    ("change", "make", "before", "after"),
    [
        (in_turns, torch.optim.AdamW, WIDE, NARROW),
        pytest.param(in_turns, torch.optim.AdamW, NARROW, WIDE, marks=THOROUGH),
        (thawed, torch.optim.Adam, (1, {}), WIDE),
        pytest.param(thawed, torch.optim.Adam, NARROW, (1, {}), marks=THOROUGH),
        (frozen_for_a_while, torch.optim.RAdam, WIDE, (1, {})),
        pytest.param(frozen_for_a_while, torch.optim.RAdam, (1, {}), WIDE, marks=THOROUGH),
        pytest.param(in_turns, Dotted, (2, {}), (2, {}), marks=THOROUGH),
        (in_turns, Dotted, (1, {}), (2, {})),
    ],
)
def test_states_are_there_when_their_parameter_is_trained_again(
    change: Any,
    make: Any,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    tmp_path: Path,
) -> None:
    whole = trained(change, make, *before, tmp_path / "run", goes_on=False)
    _saved_again(change, make, tmp_path / "run")
    found = trained(change, make, *after, tmp_path / "run", goes_on=True)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("change", [in_turns, frozen_for_a_while])
def test_masters_are_there_when_their_parameter_is_trained_again(
    change: Any, tmp_path: Path
) -> None:
    entries = {"precision": weft.Precision(masters=True), "zero": weft.Zero(1)}
    given = change, torch.optim.AdamW, 2, entries, tmp_path
    whole = trained(*given, goes_on=False, dtype=torch.bfloat16)
    found = trained(*given, goes_on=True, dtype=torch.bfloat16)
    assert_same(found, whole)


@pytest.mark.parametrize(
    ("ranks", "entries"),
    [(1, {}), (2, {"zero": weft.Zero(3)}), (3, {"parameters": {"trunk.weight": weft.split(0)}})],
)
def test_masters_of_frozen_parameters_are_given_whole(
    ranks: int, entries: dict[str, Any], tmp_path: Path
) -> None:
    """Those of a plan that ran before, and those of a checkpoint; both follow what is written."""
    strategy = weft.Strategy(precision=weft.Precision(masters=True), **entries)
    place = weft.placement("cpu", list(range(ranks)))

    def compiled(model: Heads) -> weft.Program:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = batch_of(0, torch.bfloat16)
        return weft.compile(model, loss_fn, optimizer, batch, placement=place, strategy=strategy)

    torch.manual_seed(0)
    models = [Heads().bfloat16() for _ in range(2)]
    with weft.local_world(ranks):
        program = compiled(models[0])
        program.step(batch_of(0, torch.bfloat16))
        known = program.full_state_dict(masters=True)["trunk.weight"]
        models[0].trunk.requires_grad_(False)
        program.step(batch_of(1, torch.bfloat16))
        assert torch.equal(program.full_state_dict(masters=True)["trunk.weight"], known)
        assert not torch.equal(known, known.bfloat16().float())
        program.save(tmp_path / "saved")
        program.close()
        models[1].trunk.requires_grad_(False)
        program = compiled(models[1])
        program.load(tmp_path / "saved")
        assert torch.equal(program.full_state_dict(masters=True)["trunk.weight"], known)
        with torch.no_grad():
            models[1].trunk.weight[0].fill_(2)
        known[0] = 2
        state = program.full_state_dict(masters=True)
        assert torch.equal(state["trunk.weight"], known)
        state["trunk.weight"] = known + 1e-4
        program.load_full_state_dict(state)
        models[1].trunk.requires_grad_(True)
        program.step(batch_of(2, torch.bfloat16), update=False)
        assert_same(program.full_state_dict(masters=True), state)
        program.close()


def _saved_again(change: Any, make: Any, path: Path) -> None:
    """Load and save by a program that makes no step."""
    torch.manual_seed(5)
    model = Heads().double()
    change(model, 0)
    optimizer = make(model.parameters())
    with weft.local_world(2):
        program = weft.compile(
            *(model, loss_fn, optimizer, batch_of(0)),
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(batch={"*": weft.split(0)}),
        )
        program.load(path / "saved")
        program.save(path / "again")
        before = everything(program)
        # A checkpoint without them takes them away.
        program.load(path / "again")
        assert_same(everything(program), before)
        program.close()


def test_a_checkpoint_without_states_leaves_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = torch.optim.Adam(model.parameters())
    with weft.local_world(2):
        program = weft.compile(
            *(model, loss_fn, optimizer, batch_of(0)), placement=weft.placement("cpu", [0, 1])
        )
        program.save(tmp_path / "empty")
        # As an optimizer's load_state_dict leaves it, whole on every process.
        held = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
        optimizer.state[model.two.bias] = dict(held)
        program.save(tmp_path / "held")
        program.load(tmp_path / "empty")
        assert model.two.bias not in optimizer.state
        program.load(tmp_path / "held")
        for name, value in held.items():
            assert torch.equal(optimizer.state[model.two.bias][name].full().float(), value), name
        program.close()
