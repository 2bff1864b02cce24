"""What a step keeps in the user's objects: caches of constants are made anew, all else is refused, nothing stays."""

from __future__ import annotations

import copy
import gc
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import weft
from weft.capture.python.unbacked import is_unbacked
from weft.errors import CaptureError
from weft.files import in_library

pytestmark = pytest.mark.usefixtures("thawed")
Keep = Callable[[Any], None]


def batch(size: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 3, generator=made), "y": torch.randn(size, 2, generator=made)}


def base(model: nn.Module, given: Any) -> torch.Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


def made(loss_fn: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = copy.deepcopy(model)
    strategy = weft.Strategy(batch={"*": weft.split(0)})
    ranks = weft.placement("cpu", [0, 1])
    program = weft.compile(model, loss_fn, optimizer, batch(), placement=ranks, strategy=strategy)
    return program, plain


def left() -> list[Any]:
    """Tensors without data and later numbers that are in no cycle of garbage."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is FakeTensor or is_unbacked(each)]


@lru_cache
def cached(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)[:, None] / 10


@lru_cache(maxsize=None)  # noqa: UP033
def cached_all(size: int) -> torch.Tensor:
    return cached.__wrapped__(size)


class InClass:
    table: ClassVar[dict[int, torch.Tensor]] = {}
    last: torch.Tensor | None = None

    @classmethod
    def get(cls, size: int) -> torch.Tensor:
        if size not in cls.table:
            cls.table[size] = cached.__wrapped__(size)
        return cls.table[size]

    @classmethod
    def attribute(cls, size: int) -> torch.Tensor:
        if cls.last is None or len(cls.last) != size:
            cls.last = cached.__wrapped__(size)
        return cls.last


PAIR: dict[str, Any] = {"both": (None, None)}


def in_a_tuple(size: int) -> torch.Tensor:
    if PAIR["both"][0] != size:
        PAIR["both"] = (size, cached.__wrapped__(size))
    found: torch.Tensor = PAIR["both"][1]
    return found


def in_a_default(size: int, table: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    if size not in table:
        table[size] = cached.__wrapped__(size)
    return table[size]


def on_a_function(size: int) -> torch.Tensor:
    if len(getattr(on_a_function, "last", ())) != size:
        on_a_function.last = cached.__wrapped__(size)  # type: ignore[attr-defined]
    found: torch.Tensor = on_a_function.last  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    "cache",
    [cached, cached_all, InClass.get, InClass.attribute, in_a_tuple, in_a_default, on_a_function],
)
def test_caches_of_constants_anywhere_are_made_in_each_step(cache: Any) -> None:
    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        return base(model, given) + (cache(len(given["x"])) * model(given["x"])).mean()

    with weft.local_world(2):
        program, plain = made(loss_fn)
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        for seed, size in enumerate((4, 6, 4)):
            loss = program.step(batch(size, seed))
            assert type(cache(size)) is torch.Tensor
            expected = loss_fn(plain, batch(size, seed))
            expected.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(loss, expected.detach())
        program.close()


class Slots:
    __slots__ = ("value",)
    value: Any


class Meter:
    def __init__(self) -> None:
        self.values: list[Any] = []
        self.slots = Slots()
        self.table: defaultdict[str, list[Any]] = defaultdict(list)
        self.deep: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": []}}}}}}


METER = Meter()


@lru_cache
def last_of(_: int) -> list[Any]:
    return []


KEPT: dict[str, Keep] = {
    "Slots.value": lambda d: setattr(METER.slots, "value", d),
    "test_kept_tensors.METER|Meter.deep|dict": lambda d: METER.deep["a"]["b"]["c"]["d"]["e"][
        "f"
    ].append(d),
    "last_of": lambda d: last_of(0).append(d),
}


@pytest.mark.parametrize("where", KEPT)
def test_tensors_kept_where_nobody_looks_are_refused_and_taken_out(where: str) -> None:
    keep = KEPT[where]

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        loss = base(model, given)
        keep(loss.detach())
        return loss

    with weft.local_world(2), pytest.raises(CaptureError, match=f"keeps a tensor in .*({where})"):
        made(loss_fn)
    assert not left()


@pytest.mark.parametrize("form", ["list", "dict", "attribute", "tuple"])
def test_numbers_that_are_kept_are_refused(form: str) -> None:
    log: list[Any] = []
    values = {"loss": 0.0}
    meter = Meter()
    keep: dict[str, Keep] = {
        "list": log.append,
        "dict": lambda number: values.update(loss=number),
        "attribute": lambda number: setattr(meter, "values", number),
        "tuple": lambda number: log.append((1, number)),
    }
    put = keep[form]

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        loss = base(model, given)
        put(loss.item())
        return loss

    with weft.local_world(2), pytest.raises(CaptureError, match="keeps a number in .*Return it"):
        made(loss_fn)
    assert not left()


def test_a_step_that_fails_leaves_nothing() -> None:
    slots = Slots()
    cached.cache_clear()

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        slots.value = cached(len(given["x"]))
        raise ValueError("no step")

    with weft.local_world(2), pytest.raises(CaptureError, match="no step"):
        made(loss_fn)
    assert not hasattr(slots, "value")
    assert type(cached(4)) is torch.Tensor
    assert not left()


@pytest.fixture
def unsearched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes through all that is alive, which takes long."""

    def fail(*_: Any) -> None:
        raise AssertionError("looked for who holds what")

    monkeypatch.setattr(gc, "get_referrers", fail)


@pytest.mark.usefixtures("unsearched")
def test_nothing_is_looked_for_where_only_the_capture_held_it() -> None:
    held, log = {"n": 1.0}, list[int]()

    def counted(model: nn.Module, given: Any) -> torch.Tensor:
        log.append(0)
        return base(model, given) * len(log)

    def branched(model: nn.Module, given: Any) -> torch.Tensor:
        return base(model, given) if held["n"] == 1 else base(model, given).exp()

    with weft.local_world(2):
        with pytest.raises(CaptureError, match="from 0 to 1"):
            made(counted)
        program, _ = made(branched)
        before = program.step(batch(2)).item()
        held["n"] = 2.0  # traced like the other, which does not fit
        assert program.step(batch(2)).item() != before
    assert not left()


def test_of_the_frames_of_an_error_those_of_the_user_keep_their_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_TRACEBACK", "full")

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        number = len(given["x"])
        raise ValueError(f"no step of {number}")

    with weft.local_world(2), pytest.raises(CaptureError, match="no step") as caught:
        made(loss_fn)
    error = caught.value.__cause__
    assert error is not None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert frames[-1].f_locals["number"] == 4
    of_torch = [each for each in frames if in_library(each.f_code.co_filename)]
    assert of_torch
    assert not any(each.f_locals for each in of_torch)


def last_in_a_class() -> Any:
    class Last:
        loss: Any = None

    def exchange(loss: torch.Tensor) -> Any:
        before, Last.loss = Last.loss, loss
        return before

    return exchange


def last_in_a_list() -> Any:
    losses: list[torch.Tensor] = []

    def exchange(loss: torch.Tensor) -> Any:
        losses.append(loss)
        return losses[-2] if len(losses) > 1 else None

    return exchange


def last_in_a_closure() -> Any:
    last: Any = None

    def exchange(loss: torch.Tensor) -> Any:
        nonlocal last
        before, last = last, loss
        return before

    return exchange


def last_on_a_function() -> Any:
    def exchange(loss: torch.Tensor) -> Any:
        before = getattr(exchange, "last", None)
        exchange.last = loss  # type: ignore[attr-defined]
        return before

    return exchange


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (last_in_a_class, "Last.loss"),
        (last_in_a_list, "losses in the closure"),
        (last_in_a_closure, "last in the closure"),
        (last_on_a_function, "exchange.last"),
    ],
)
def test_tensors_of_the_last_step_are_refused(form: Callable[[], Any], named: str) -> None:
    exchange = form()

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        loss = base(model, given)
        before = exchange(loss.detach())
        return loss if before is None else loss + (loss - before).abs()

    with weft.local_world(2), pytest.raises(CaptureError, match=f"keeps in .*{named}.* next step"):
        made(loss_fn)
    assert exchange(torch.zeros(())) is None


class Filled(nn.Linear):
    """Fills an empty buffer in its first forward."""

    scale: torch.Tensor | None

    def __init__(self, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(3, 2)
        self.fill = fill
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = self.fill(x)
        return super().forward(x) * self.scale


def filled_in_place(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(2)
    made[:1].copy_(x.mean())
    return made


@pytest.mark.parametrize(
    "fill",
    [lambda x: x.detach().mean(), filled_in_place, lambda x: torch.rand(2)],
    ids=["batch", "in place", "random"],
)
def test_an_empty_buffer_that_is_filled_by_more_than_constants_is_refused(fill: Any) -> None:
    torch.manual_seed(0)
    model = Filled(fill)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with weft.local_world(2), pytest.raises(CaptureError, match="keeps in scale a tensor"):
        weft.compile(model, base, optimizer, batch(), placement=weft.placement("cpu", [0, 1]))
    assert model.scale is None


class Remembering(nn.Linear):
    """Adds what stands in a container of its own, and puts a tensor there for the next step."""

    def __init__(self, memory: Any, place: Callable[[Any], tuple[Any, Any]], counts: bool) -> None:
        super().__init__(3, 2)
        self.memory, self.place, self.counts = memory, place, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        space, key = self.place(self.memory)
        before = space[key]
        space[key] = before + 1 if self.counts else found.detach().mean(0)
        return found if before is None else found * before


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(
    ("memory", "place"),
    [
        ({"h": torch.zeros(2)}, lambda memory: (memory, "h")),
        ({"a": {"h": torch.zeros(2)}}, lambda memory: (memory["a"], "h")),
        ([torch.zeros(2)], lambda memory: (memory, 0)),
        (deque([torch.zeros(2)]), lambda memory: (memory, 0)),
        (SimpleNamespace(h=torch.zeros(2)), lambda memory: (vars(memory), "h")),
    ],
)
def test_a_container_of_a_module_that_is_read_and_written(
    memory: Any, place: Any, counts: bool
) -> None:
    model = Remembering(copy.deepcopy(memory), place, counts)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with weft.local_world(2), pytest.raises(CaptureError, match="keeps .*in memory"):
        weft.compile(model, base, optimizer, batch(), placement=weft.placement("cpu", [0, 1]))
    assert repr(model.memory) == repr(memory)


def test_a_container_on_a_parameter_that_is_read_and_written() -> None:
    class Cached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight: Any = self.weight
            found = super().forward(x) + weight.cache[0]
            weight.cache[0] = found.detach().mean(0)
            return found

    model: Any = Cached(3, 2)
    model.weight.cache = [torch.zeros(2)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with weft.local_world(2), pytest.raises(CaptureError, match=r"keeps in weight\.cache a tensor"):
        weft.compile(model, base, optimizer, batch(), placement=weft.placement("cpu", [0, 1]))


def test_a_container_of_a_module_that_held_nothing() -> None:
    model = Remembering({"h": None}, lambda memory: (memory, "h"), False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with weft.local_world(2), pytest.raises(CaptureError, match="keeps in memory a tensor"):
        weft.compile(model, base, optimizer, batch(), placement=weft.placement("cpu", [0, 1]))
    assert model.memory == {"h": None}


def test_an_empty_buffer_that_is_filled_by_constants() -> None:
    model = Filled(lambda x: torch.full((2,), float(x.shape[1])))
    plain = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain))
    ranks = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        program = weft.compile(model, base, ours, batch(), placement=ranks)
        for seed in range(3):
            loss = base(plain, batch(seed=seed))
            loss.backward()  # type: ignore[no-untyped-call]
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(program.step(batch(seed=seed)), loss.detach())
        program.close()


@pytest.mark.parametrize("form", ["flag", "kept"])
def test_what_only_the_first_step_does_is_refused(form: str) -> None:
    held: dict[str, Any] = {"first": None}

    def loss_fn(model: Any, given: Any) -> torch.Tensor:
        loss = base(model, given)
        if form == "flag" and not hasattr(model, "ready"):
            model.ready = True
            return loss * 2
        if form == "kept" and held["first"] is None:
            held["first"] = loss.detach()
            return loss * 2
        return loss

    named = {"flag": "changes ready from not there to True", "kept": "keeps a tensor in held"}
    with weft.local_world(2), pytest.raises(CaptureError, match=named[form]):
        made(loss_fn)


def test_what_a_hook_hands_to_the_same_step_may_be_kept() -> None:
    features: dict[str, torch.Tensor] = {}

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        features["x"] = model(given["x"])
        return F.mse_loss(features["x"], given["y"])

    with weft.local_world(2):
        program, plain = made(loss_fn)
        loss = program.step(batch())
        program.close()
    assert features == {}
    torch.testing.assert_close(loss, loss_fn(plain, batch()).detach())
