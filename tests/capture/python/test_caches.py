"""Results that functions with an `lru_cache` keep: which calls are repeated, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from weft.capture.python.caches import depending, kept_results
from weft.capture.python_guards import Guard


def scaled(*sizes: int, by: Any = 2, **more: Any) -> Any:
    return [by, *sizes, sorted(more.items())]


class Holder:
    @staticmethod
    @lru_cache
    def of_class(x: int) -> int:
        return x + 1

    @lru_cache  # noqa: B019
    def of_object(self, x: int) -> int:
        return x + 1


CALLS: list[Callable[[Any], Any]] = [
    lambda f: f(),
    lambda f: f(3),
    lambda f: f("a", "b"),
    lambda f: f(1, by=3),
    lambda f: f(by=(1, 2), a=0, b="x"),
    lambda f: f(1, 2, c=None),
]


def guards_of(*functions: Any) -> list[Guard]:
    return kept_results([SimpleNamespace(value=each) for each in functions])  # type: ignore[list-item]


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("maxsize", [4, None])
@pytest.mark.parametrize("call", CALLS)
def test_each_kept_call_is_asked_again(call: Any, maxsize: int | None, typed: bool) -> None:
    memo = lru_cache(maxsize, typed)(scaled)
    expected = call(memo)
    (guard,) = guards_of(memo)
    assert guard.value.number == expected


def test_a_result_holds_until_the_step_would_get_another() -> None:
    factor = [2]
    memo = lru_cache(lambda x: x * factor[0])
    memo(3)
    (guard,) = guards_of(memo)
    assert guard.holds()
    factor[0] = 5
    assert guard.holds()  # the cache still has the result
    memo.cache_clear()
    assert not guard.holds()


def test_results_that_cannot_be_compared_are_not_asked_for() -> None:
    memo = lru_cache(lambda x: object())
    memo(1)
    assert guards_of(memo) == []


def test_calls_with_what_stands_for_data_are_not_repeated() -> None:
    memo = lru_cache(lambda *xs: len(xs))
    with FakeTensorMode():
        tensor = torch.ones(2)
    memo(tensor)
    memo(1, tensor)
    memo(1, 2)
    (guard,) = guards_of(memo)
    assert guard.value.number == 2


def test_functions_are_found_in_methods_and_partials_once() -> None:
    held = Holder()
    held.of_object(3)
    Holder.of_class(4)
    memo = vars(Holder)["of_object"]
    found = guards_of(held.of_object, partial(held.of_object, 3), memo, Holder.of_class)
    assert sorted(each.value.number for each in found) == [4, 5]
    memo.cache_clear()


def test_caches_of_libraries_are_left_alone() -> None:
    assert guards_of(torch.fx.operator_schemas.get_signature_for_torch_op, len, 3) == []


DEPENDS: dict[str, Callable[[Any], Any]] = {
    "values": lambda x: x + 1,
    "a size that a value gives": lambda x: torch.ones(2).mul(x.sum()),
    "random numbers": lambda x: torch.rand(3),
    "a write in place": lambda x: torch.zeros(2).add_(x),
    "a view of what is written": lambda x: written_later(torch.zeros(2), x)[0],
    "a base of what is written": lambda x: written_later(torch.zeros(2), x)[1],
}
DEPENDS_NOT: dict[str, Callable[[Any], Any]] = {
    "a shape": lambda x: torch.zeros_like(x) + 1,
    "shape and dtype of a new tensor": lambda x: x.new_full((3,), 2.0).exp(),
    "constants": lambda x: torch.arange(4) * 2,
    "a write of a constant": lambda x: torch.zeros(2).add_(1.0),
}


def written_later(zeros: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A view, and what it is of, that is written behind it."""
    view = zeros[:1]
    zeros[1:].copy_(x[1:])
    return view, zeros


def depends(function: Callable[[Any], Any]) -> bool:
    """Whether the last value of a function's graph depends on its argument, or on chance."""
    graph = make_fx(function)(torch.ones(2)).graph
    (output,) = graph.find_nodes(op="output")
    return output.args[0] in depending(graph, graph.find_nodes(op="placeholder"))


@pytest.mark.parametrize("name", DEPENDS)
def test_what_depends_on_the_batch_or_on_chance(name: str) -> None:
    assert depends(DEPENDS[name])


@pytest.mark.parametrize("name", DEPENDS_NOT)
def test_what_is_the_same_in_every_step(name: str) -> None:
    assert not depends(DEPENDS_NOT[name])
