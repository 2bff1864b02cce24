"""The same batches on any number of ranks and workers, and the same training."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

import weft
from program.data.datasets import SAMPLES, Drawn, Streamed, example, loss_fn, net, plain_losses
from weft.errors import UserError

SIZE = 18


def batches(loader: weft.Loader, epochs: int = 1) -> list[dict[str, torch.Tensor]]:
    return [batch for _ in range(epochs) for batch in loader]


def assert_equal(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dataset", [Drawn, Streamed])
def test_workers_change_nothing(dataset: Any, workers: int) -> None:
    """Not what samples draw either."""
    options = {"shuffle": dataset is Drawn, "seed": 5}
    if dataset is Streamed and workers > 1:
        pytest.skip("a stream has one reader")
    expected = batches(weft.Loader(dataset(), SIZE, **options), 2)
    torch.manual_seed(3)
    assert_equal(batches(weft.Loader(dataset(), SIZE, workers=workers, **options), 2), expected)
    assert [len(batch["y"]) for batch in expected] == [18, 18, 14] * 2
    assert not torch.equal(expected[0]["x"], expected[3]["x"])  # another epoch draws other numbers


@pytest.mark.parametrize("dataset", [Drawn, Streamed])
@pytest.mark.parametrize("taken", range(7))
def test_going_on_in_the_middle(dataset: Any, taken: int) -> None:
    """Each sample comes exactly once."""
    options = {"shuffle": dataset is Drawn, "seed": 1}
    whole = batches(weft.Loader(dataset(), SIZE, **options), 2)
    first = weft.Loader(dataset(), SIZE, **options)
    stream = itertools.chain.from_iterable(first for _ in range(2))
    head = list(itertools.islice(stream, taken))
    second = weft.Loader(dataset(), SIZE, **options)
    second.load_state_dict(first.state_dict())
    rest = batches(second, 2 - second.epoch)
    assert_equal([*head, *rest], whole)


def test_the_last_batch() -> None:
    data = Drawn()
    assert len(weft.Loader(data, SIZE)) == 3
    dropping = weft.Loader(data, SIZE, drop_last=True)
    assert (len(dropping), len(batches(dropping))) == (2, 2)
    assert len(batches(weft.Loader(Streamed(), SIZE, drop_last=True))) == 2


def test_samples_draw_alike_whatever_the_batch() -> None:
    small, large = (batches(weft.Loader(Drawn(), size, seed=2)) for size in (5, 25))
    for key in ("x", "y"):
        joined = [torch.cat([batch[key] for batch in each]) for each in (small, large)]
        assert torch.equal(*joined)


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2,), {}),
    ((7,), {"zero": weft.Zero(2)}),
    ((2, 2), {"batch": {"*": (weft.split(0), weft.broadcast)}}),
    ((2,), {"stages": 2, "micro_batches": 2, "batch": {"*": weft.split(0)}}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_training_is_that_of_one_device(case: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    grid, entries = case
    expected = plain_losses(weft.Loader(Drawn(), SIZE, shuffle=True), 2)
    model = net()
    ranks = torch.arange(torch.Size(grid).numel()).reshape(grid)
    with weft.local_world(ranks.numel()):
        program = weft.compile(
            *(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), example(SIZE)),
            placement=weft.placement("cpu", ranks.tolist()),
            strategy=weft.Strategy(**entries),
        )
        loader = weft.Loader(Drawn(), SIZE, program, shuffle=True)
        found = [float(program.step(batch)) for _ in range(2) for batch in loader]
        program.close()
    assert found == pytest.approx(expected, rel=1e-12)


class Eager(IterableDataset[dict[str, Any]]):
    """Draws when it is first asked, not when samples are."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([{"x": torch.rand(2), "y": number} for number in order])


def masked(samples: list[Any]) -> Any:
    """Draws for each batch."""
    batch = default_collate(samples)
    return {**batch, "mask": torch.rand(len(samples)) < 0.5}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_datasets_and_batches_draw_hangs_on_the_seed(workers: int) -> None:
    for dataset in (Eager(), Drawn()):
        first = batches(weft.Loader(dataset, SIZE, collate_fn=masked))
        torch.manual_seed(8)
        assert_equal(batches(weft.Loader(dataset, SIZE, collate_fn=masked, workers=workers)), first)
        loader = weft.Loader(dataset, SIZE, collate_fn=masked)
        next(iter(loader))
        assert_equal(batches(loader), first[1:])


def test_a_loop_leaves_generators_as_they_are() -> None:
    for workers in (0, 1):
        before = torch.get_rng_state()
        batches(weft.Loader(Drawn(), SIZE, shuffle=True, workers=workers))
        assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- what cannot be


def test_a_newer_loop_ends_the_older() -> None:
    loader = weft.Loader(Drawn(), SIZE)
    with pytest.raises(UserError, match="another loop over this loader has begun"):
        list(zip(loader, loader, strict=True))


def test_a_place_that_is_loaded_ends_the_loop_under_way() -> None:
    loader = weft.Loader(Drawn(), SIZE)
    loop = iter(loader)
    first = next(loop)
    before = loader.state_dict()
    second = next(loop)
    loader.load_state_dict(before)
    with pytest.raises(UserError, match="load_state_dict was called"):
        next(loop)
    assert_equal([first, *loader], [first, second, *batches(weft.Loader(Drawn(), SIZE))[2:]])


def test_places_that_cannot_be() -> None:
    loader = weft.Loader(Drawn(), SIZE)
    state = loader.state_dict()
    for name, value in (("epoch", None), ("step", -2), ("step", "x")):
        with pytest.raises(UserError, match=f"the state has {name}="):
            loader.load_state_dict({**state, name: value})
    none: Any
    for none in (None, [], "state"):
        with pytest.raises(UserError, match="must be what state_dict gave"):
            loader.load_state_dict(none)  # type: ignore[arg-type]
    loader.load_state_dict({**state, "step": 4})
    with pytest.raises(UserError, match="is after 4 batches, and an epoch has 3"):
        batches(loader)


class Dying(Drawn):
    def __getitem__(self, number: int) -> dict[str, Any]:
        os._exit(3)


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(UserError, match="a worker process has ended"):
        batches(weft.Loader(Dying(), SIZE, workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named(workers: int) -> None:
    loader = weft.Loader(Drawn(bad=20), SIZE, workers=workers)
    found: Iterator[Any] = iter(loader)
    next(found)
    with pytest.raises(
        UserError, match=r"sample 20: OSError: the file is gone \(.*datasets\.py:\d+\)"
    ):
        next(found)


def test_a_stream_that_ends_before_its_place_is_told() -> None:
    loader = weft.Loader(Streamed(), 4)
    state = {**loader.state_dict(), "step": 13}
    loader.load_state_dict(state)
    assert list(loader) == []  # behind the last batch
    loader.load_state_dict({**state, "step": 14})
    with pytest.raises(UserError, match="is after 14 batches, and the dataset has given 13"):
        next(iter(loader))


def test_samples_that_do_not_go_together_are_named() -> None:
    data = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(UserError, match="samples 0 to 1: they cannot be collated: RuntimeError"):
        batches(weft.Loader(data, 2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset": 3}, "with __getitem__ or __iter__, got 3"),
        ({"batch_size": 0}, "batch_size must be a number from 1, got 0"),
        ({"batch_size": True}, "batch_size must be a number"),
        ({"workers": -1}, "workers must be a number from 0"),
        ({"ahead": 0}, "ahead must be a number from 1"),
        ({"seed": 0.5}, "seed must be a number, got"),
        ({"dataset": Streamed(), "shuffle": True}, "an iterable dataset is read in its own order"),
        ({"dataset": Streamed(), "workers": 2}, "an iterable dataset is read in its own order"),
        ({"shuffle": True, "sampler": [1]}, "not both"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        weft.Loader(**{"dataset": Drawn(), "batch_size": 4, **arguments})


def test_a_state_of_another_loader() -> None:
    state = weft.Loader(Drawn(), 4, seed=1).state_dict()
    with pytest.raises(UserError, match="seed=1, this one has 0"):
        weft.Loader(Drawn(), 4).load_state_dict(state)
    with pytest.raises(UserError, match="batch_size=4, this one has 5"):
        weft.Loader(Drawn(), 5, seed=1).load_state_dict(state)
    with pytest.raises(UserError, match="shuffle=False, this one has True"):
        weft.Loader(Drawn(), 4, seed=1, shuffle=True).load_state_dict(state)
    del state["shuffle"]  # as of an earlier version
    weft.Loader(Drawn(), 4, seed=1, shuffle=True).load_state_dict(state)


def test_a_dataset_that_has_grown_takes_no_state_of_the_middle_of_an_epoch() -> None:
    """Its permutation is another one: samples would be skipped, and others come twice."""
    data = list(range(9))
    loader = weft.Loader(data, 3, shuffle=True)
    next(iter(loader))
    middle = loader.state_dict()
    batches(loader)
    other = weft.Loader([*data, 9], 3, shuffle=True)
    other.load_state_dict(loader.state_dict())
    assert len(batches(other)) == 4
    other.load_state_dict(middle)
    assert other.state_dict() == middle
    with pytest.raises(UserError, match="of an epoch of 9 samples, and this one has 10"):
        batches(other)


def test_all_samples_of_an_epoch_are_there() -> None:
    data = Drawn()
    batches(weft.Loader(data, SIZE, shuffle=True))
    assert sorted(data.asked) == list(range(SAMPLES))
