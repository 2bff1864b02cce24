"""Numbers, flags and texts in a batch that later batches change: taken as they are then, as plain PyTorch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft
from single_device import assert_same_state
from weft.errors import BatchError, UserError

STAGES = weft.Strategy(stages=2, micro_batches=2)


def batch_of(seed: int, rows: int = 8, **constants: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, dtype=torch.float64, generator=generator), **constants}


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compiled(model: nn.Module, loss_fn: Any, batch: Any, strategy: Any = None) -> weft.Program:
    place = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss_fn, sgd(model), batch, placement=place, strategy=strategy)


def check(loss_fn: Any, batches: list[Any], plans: int, strategy: Any = None) -> None:
    """Losses and the final state are those of plain PyTorch, with so many plans."""
    model = two_layers()
    plain = copy.deepcopy(model)
    other = sgd(plain)
    with weft.local_world(2):
        program = compiled(model, loss_fn, batches[0], strategy)
        for batch in batches:
            other.zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            other.step()
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-12)
        assert_same_state(program.full_state_dict(), plain.state_dict(), 1e-12)
        assert len(program._core.variants._all) == plans
        program.close()


def tempered(model: nn.Module, batch: Any) -> Any:
    return (model(batch["x"]) / batch["temperature"]).square().mean() * (1 + batch["epoch"])


@pytest.mark.parametrize("strategy", [None, STAGES], ids=["data", "stages"])
def test_numbers_are_inputs(strategy: Any) -> None:
    batches = [batch_of(i, temperature=0.5 + i / 10, epoch=i) for i in range(4)]
    check(tempered, batches, 1, strategy)


def chosen(model: nn.Module, batch: Any) -> Any:
    made = model(batch["x"])
    loss = made.abs().mean() if batch["kind"] == "l1" else made.square().mean()
    return loss * 2 if batch["warm"] else loss


def test_texts_and_flags_are_planned_for() -> None:
    given: list[tuple[str | None, bool]] = [("l1", True), ("l2", True), ("l1", True), (None, False)]
    check(chosen, [batch_of(i, kind=kind, warm=warm) for i, (kind, warm) in enumerate(given)], 3)


UNREAD: dict[str, Any] = {
    "number": lambda i: i,
    "text": lambda i: f"{i}.png",
    "list": lambda i: [f"{i}.{n}.png" for n in range(8)],
    "list of other lengths": lambda i: ["a"] * i,
    "some none": lambda i: ["a" if n & i else None for n in range(8)],
    "tuple": lambda i: (i, "b", 2.5 * i),
    "dict": lambda i: {"path": [f"{i}.png"], "at": {"row": i, "seen": bool(i % 2)}},
    "keys": lambda i: {f"key {i}": i},
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_nothing_reads_needs_no_plan(name: str) -> None:
    batches = [batch_of(i, other=UNREAD[name](i)) for i in range(18)]
    check(squared, batches, 1)


def squared(model: nn.Module, batch: Any) -> Any:
    """As loops do that pass on the tensors of a batch."""
    given = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor)}
    moved = {k: v.to(torch.float64) if hasattr(v, "to") else v for k, v in batch.items()}
    return model(given["x"]).square().mean() + 0 * moved["x"].sum()


def test_a_text_is_read_beside_others_that_are_not() -> None:
    batches = [
        batch_of(i, kind=["l1", "l2"][i % 2], warm=False, path=f"{i}.png", scales=[0.5 + i, i])
        for i in range(18)
    ]
    check(lambda model, batch: chosen(model, batch) * batch["scales"][0], batches, 2)


def test_a_text_that_names_a_function_is_read() -> None:
    """No stand-in can be passed there; what is beside it is not read all the same."""
    batches = [batch_of(i, name=["relu", "tanh"][i % 2], path=[f"{i}.png"]) for i in range(18)]

    def named(model: nn.Module, batch: Any) -> Any:
        made: torch.Tensor = getattr(torch, batch["name"])(model(batch["x"]))
        return made.square().mean()

    check(named, batches, 2)


def test_lists_that_are_read_are_planned_for() -> None:
    def counted(model: nn.Module, batch: Any) -> Any:
        longest = max(map(len, batch["texts"]))
        return model(batch["x"]).square().mean() * longest * len(batch["texts"])

    texts = [["a", "bb"], ["cc", "d"], ["a"], ["aaa", "b"], ["a", "dd"]]
    check(counted, [batch_of(i, texts=each) for i, each in enumerate(texts)], 4)


def test_leaves_are_returned_as_they_are_in_this_batch() -> None:
    def both(model: nn.Module, batch: Any) -> Any:
        return squared(model, batch), batch["path"], batch["meta"]["ids"][0], batch

    model = two_layers()
    batches = [
        batch_of(i, path=[f"{i}.png", "b"], meta={"ids": [i, 5], "at": "x" * i}) for i in range(18)
    ]
    with weft.local_world(2):
        program = compiled(model, both, batches[0])
        for i, batch in enumerate(batches):
            _, path, number, whole = program.step(batch)
            assert (path, number) == ([f"{i}.png", "b"], i)
            assert torch.equal(whole["x"], batch["x"])
            assert {**whole, "x": 0} == {**batch, "x": 0}
        assert len(program._core.variants._all) == 1
        program.close()


def test_lists_and_tuples_are_the_same_containers() -> None:
    def scaled(model: nn.Module, batch: Any) -> Any:
        assert isinstance(batch, tuple)
        assert isinstance(batch[1], list)
        return model(batch[0]).square().mean() * batch[1][0].mean()

    x, y = torch.randn(8, 6, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    model = two_layers()
    with weft.local_world(2):
        program = compiled(model, scaled, (x, [y]))
        found = [float(program.step(each, update=False)) for each in ((x, [y]), [x, (y,)])]
        assert found[0] == found[1]
        with pytest.raises(BatchError, match="leaves"):
            program.step([x, y])
        program.close()


def test_other_shapes_take_the_number_of_their_batch() -> None:
    batches = [batch_of(i, 8 - i % 2 * 4, temperature=1.0 + i, epoch=1) for i in range(4)]
    check(tempered, batches, 2)


def test_they_come_back_and_an_evaluation_takes_its_own() -> None:
    def both(model: nn.Module, batch: Any) -> Any:
        return tempered(model, batch), batch["temperature"]

    def scaled(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]) * batch["temperature"]

    model = two_layers()
    plain = copy.deepcopy(model)
    batches = [batch_of(0, temperature=t, epoch=0) for t in (1.0, 2.0, 4.0)]
    with weft.local_world(2):
        program = compiled(model, both, batches[0])
        evaluation = program.evaluation(scaled, batches[0])
        for batch in batches:
            torch.testing.assert_close(evaluation.step(batch), scaled(plain, batch).detach())
        assert [program.step(batch, update=False)[1] for batch in batches] == [1.0, 2.0, 4.0]
        program.close()


def test_a_tensor_in_their_place_is_refused_and_too_many_plans_are() -> None:
    def hashed(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).square().mean() * len(batch["name"])

    with weft.local_world(1):
        model = two_layers()
        program = weft.compile(
            model, hashed, sgd(model), batch_of(0, name=""), placement=weft.placement("cpu", [0])
        )
        with pytest.raises(BatchError, match=r"'name'.*the constant '', got a tensor"):
            program.step(batch_of(0, name=torch.ones(())))
        for number in range(16):
            program.step(batch_of(0, name="x" * number))
        with pytest.raises(UserError, match=r"length of the batch's leaf 'name' was .* 16 values"):
            program.step(batch_of(0, name="x" * 16))
        program.close()
