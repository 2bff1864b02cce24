"""One program for batches of several shapes: the last batch of an epoch, sequences of other lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from single_device import adamw, plain_training, whole
from weft.capture import capture
from weft.capture.tracing import trace
from weft.compiler.hints import Hints
from weft.compiler.pipeline import compile_graph
from weft.compiler.stages import lay_out as stage_layouts
from weft.compiler.stages.lay_out import signatures_before
from weft.errors import BatchError, UserError
from weft.program.planning import variants
from weft.program.planning.build import with_lying
from weft.program.planning.variants import lying_in

Make = Callable[[nn.Module], torch.optim.Optimizer]
STRATEGIES = {
    "data": weft.data_parallel(),
    "zero1": replace(weft.data_parallel(), zero=weft.Zero(1)),
    "zero3": replace(weft.data_parallel(), zero=weft.Zero(3)),
    "stages": replace(weft.data_parallel(), stages=2, micro_batches=2),
    "tensor": weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"]),
}


def batch(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (rows, length + 1), generator=generator)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def batches() -> list[dict[str, torch.Tensor]]:
    shapes = [(8, 6), (8, 6), (6, 6), (8, 4), (8, 6), (6, 6), (2, 4)]
    return [batch(*shape, seed) for seed, shape in enumerate(shapes)]


class Language(nn.Module):
    """Embedding, two residual blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.table.weight.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def language(dtype: torch.dtype = torch.float64) -> nn.Module:
    return Language().to(dtype)


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    scores = model(batch["x"])
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch["y"].flatten())


class Counted(torch.optim.SGD):
    """Keeps a number of Python for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / state["count"])


def compiled(model: nn.Module, strategy: weft.Strategy, make: Make = adamw) -> weft.Program:
    ranks = weft.placement("cpu", [0, 1])
    return weft.compile(
        model, token_loss, make(model), batches()[0], placement=ranks, strategy=strategy
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_shape_trains_the_same_variables(name: str) -> None:
    model = language()
    losses, state = plain_training(model, token_loss, batches(), make_optimizer=adamw)
    with weft.local_world(2):
        program = compiled(model, STRATEGIES[name])
        found = [program.step(each).item() for each in batches()]
        trained = program.full_state_dict()
    assert found == pytest.approx(losses, rel=1e-9)
    for key, value in state.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-8, atol=1e-10)


def test_numbers_that_an_optimizer_counts() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Counted(model.parameters(), lr=0.5)

    model = language()
    losses, _ = plain_training(model, token_loss, batches(), make_optimizer=make)
    with weft.local_world(2):
        program = compiled(model, STRATEGIES["zero1"], make)
        found = [program.step(each).item() for each in batches()]
    assert found == pytest.approx(losses, rel=1e-9)


def _slower(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] /= 10


def _decayed(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def _frozen(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[0].up.weight.grad = None


def _grouped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 0.1})


@pytest.mark.parametrize("change", [_slower, _decayed, _frozen, _grouped])
def test_what_changes_between_two_shapes_counts_in_the_second(change: Callable[..., None]) -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        owned = (x for name, x in model.named_parameters() if not name.startswith("blocks.1"))
        return torch.optim.SGD(owned, lr=0.5)

    model = language()
    plain = copy.deepcopy(model)
    other, optimizer = make(plain), make(model)
    with weft.local_world(2):
        program = compiled(model, STRATEGIES["data"], lambda _: optimizer)
        for number, each in enumerate(batches()):
            if number == 2:
                change(plain, other)
                change(model, optimizer)
            other.zero_grad()
            loss = token_loss(plain, each)
            loss.backward()  # type: ignore[no-untyped-call]
            other.step()
            assert program.step(each).item() == pytest.approx(loss.item(), rel=1e-9)
        trained = program.full_state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-8, atol=1e-10)


class Branching(Language):
    """Takes another way for short batches, as large as the usual one."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.table(x)
        first, second = self.blocks if x.shape[1] > 5 else reversed(self.blocks)
        return second(first(x)) @ self.table.weight.T


def test_a_model_that_branches_on_shapes() -> None:
    model = Branching().double()
    losses, _ = plain_training(model, token_loss, batches(), make_optimizer=adamw)
    with weft.local_world(2):
        program = compiled(model, STRATEGIES["data"])
        found = [program.step(each).item() for each in batches()]
    assert found == pytest.approx(losses, rel=1e-9)


def test_other_shapes_are_not_traced_by_make_fx(monkeypatch: pytest.MonkeyPatch) -> None:
    with weft.local_world(2):
        program = compiled(language(), STRATEGIES["data"])
        evaluation = program.evaluation(token_loss, batches()[0])
        monkeypatch.setattr(trace, "trace", None)
        for each in batches():
            program.step(each)
            evaluation.step(each)


@pytest.mark.parametrize("name", STRATEGIES)
def test_shapes_of_about_the_size_take_the_signatures_over(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []

    def signatures(*given: Any) -> Any:
        taken.append(bool(found := signatures_before(*given)))
        return found

    with weft.local_world(2):
        program = compiled(language(), STRATEGIES[name])
        program.step(batches()[0])
        monkeypatch.setattr(stage_layouts, "signatures_before", signatures)
        program.step(batch(6, 6, seed=1))
        assert set(taken) == {True}
        taken.clear()
        program.step(batch(2, 4, seed=2))
        assert set(taken) == {False}


def test_loaded_states_reach_a_step_of_another_shape() -> None:
    """What is loaded after a step goes on in the next one, also when that is planned anew."""
    model = language()
    other, batch = copy.deepcopy(model), batches()[1:3]
    optimizer, plain = adamw(model), adamw(other)
    assert batch[0]["x"].shape != batch[1]["x"].shape
    for each in batch:
        plain.zero_grad()
        token_loss(other, each).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.load_state_dict(_with_larger_averages(plain.state_dict()))
    with weft.local_world(2):
        program = compiled(model, STRATEGIES["zero1"], lambda _: optimizer)
        for each in batch:
            program.step(each)
            optimizer.load_state_dict(_with_larger_averages(optimizer.state_dict()))
        trained = program.full_state_dict()
    for key, value in other.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-8, atol=1e-10)


def _with_larger_averages(saved: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {**own, "exp_avg": 2 * own["exp_avg"]} for number, own in saved["state"].items()
    }
    return {**saved, "state": state}


def test_gradients_of_several_shapes_add_up() -> None:
    model = language()
    other = copy.deepcopy(model)
    optimizer = adamw(other)
    for each in batches()[:4]:
        token_loss(other, each).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with weft.local_world(2):
        program = compiled(model, STRATEGIES["zero3"])
        for number, each in enumerate(batches()[:4]):
            program.step(each, update=number == 3)
        trained = program.full_state_dict()
    for key, value in other.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-8, atol=1e-10)


def test_random_numbers_go_on() -> None:
    """A dropout draws other numbers in a step of another shape than in the step before, as without it."""

    def loss_fn(model: nn.Module, each: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(model(each), 0.5).sum()

    def losses(rows: list[int]) -> list[float]:
        model = nn.Linear(4, 64, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with weft.local_world(2):
            ranks = weft.placement("cpu", [0, 1])
            each = torch.ones(8, 4, dtype=torch.float64)
            program = weft.compile(model, loss_fn, optimizer, each, placement=ranks, seed=3)
            return [program.step(each[:count]).item() for count in rows]

    assert losses([8, 6, 8])[2] == losses([8, 8, 8])[2]
    assert len(set(losses([8, 8, 8]))) == 3


def test_an_evaluation_of_other_shapes() -> None:
    model = language()
    plain = copy.deepcopy(model)
    with weft.local_world(2):
        program = compiled(model, STRATEGIES["data"])
        evaluation = program.evaluation(token_loss, batch(2, 3, 0))
        for shape in ((2, 3), (4, 3), (6, 5), (2, 3)):
            found = evaluation.step(batch(*shape, 9))
            torch.testing.assert_close(found, token_loss(plain, batch(*shape, 9)).detach())
            torch.testing.assert_close(found, whole(token_loss(model, batch(*shape, 9))))


@pytest.mark.parametrize(
    "other",
    [
        {"x": batch(8, 6, 0)["x"]},
        {**batch(8, 6, 0), "y": batch(8, 6, 0)["y"].double()},
        {**batch(8, 6, 0), "y": batch(8, 6, 0)["y"][..., None]},
        {**batch(8, 6, 0), "y": 1},
    ],
)
def test_batches_that_differ_in_more_than_shapes_are_refused(other: Any) -> None:
    with weft.local_world(2):
        program = compiled(language(), STRATEGIES["data"])
        with pytest.raises(BatchError):
            program.step(other)
        program.step(batches()[0])


def test_there_are_not_too_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MOST", 2)
    with weft.local_world(2):
        program = compiled(language(), STRATEGIES["data"])
        program.step(batch(8, 6, 0))
        program.step(batch(6, 6, 0))
        with pytest.raises(BatchError, match="planned for 2 shapes already"):
            program.step(batch(4, 6, 0))
        program.step(batch(6, 6, 0))


def test_a_shape_that_does_not_fit_leaves_the_program_usable() -> None:
    with weft.local_world(2):
        program = compiled(language(), STRATEGIES["stages"])
        with pytest.raises(UserError, match="micro"):
            program.step(batch(7, 6, 0))
        program.step(batch(8, 6, 0))


def test_the_other_shape_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with weft.local_world(2), caplog.at_level("INFO", "weft"):
        program = compiled(language(), STRATEGIES["data"])
        program.step(batch(6, 6, 0))
        program.step(batch(6, 6, 1))
    record = next(each for each in caplog.records if "planned the step again" in each.getMessage())
    assert "x int64[6, 6], y int64[6, 6]" in record.getMessage()


def test_open_parameters_lie_as_for_the_first_shape() -> None:
    """What a strategy leaves open for another shape is fixed to what the first plan has."""
    graph = capture(language(), token_loss, None, batches()[0]).graph
    ranks = weft.placement("cpu", [0, 1])
    key = "blocks.0.up.weight"

    def compiled(hints: Any) -> Any:
        return compile_graph(graph, hints, ranks, (0,))

    split = compiled({1: Hints({key: (weft.split(1),)})})
    free = {1: Hints({})}
    found = compiled(with_lying(free, lying_in(split), graph)).graph.values[key].layout
    assert found == split.graph.values[key].layout
    assert compiled(free).graph.values[key].layout != found
