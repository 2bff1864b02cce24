"""Eager steps whose shapes never come again: what is kept of them is bounded."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

import weft
from weft.tensor.dispatch import dispatch
from weft.tensor.spec import _specs


def work(first: int, last: int) -> None:
    placement = weft.placement("cpu", [0, 1])
    for size in range(first, last):
        x = weft.tensor(torch.ones(4, size), placement=placement, sbp=weft.split(0))
        x.relu().sum()


def test_recipes_and_specs_of_shapes_that_do_not_come_again_are_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "MOST_RECIPES", 8)
    monkeypatch.setattr(dispatch, "_known", {})  # without what other tests left there
    with weft.local_world(2):
        work(1003, 1083)
        gc.collect()
        assert max(len(each.recipes) for each in dispatch._known.values()) <= 8
        kept = {each.shape[-1] for each in list(_specs.values()) if len(each.shape) == 2}
        assert len(kept & set(range(1003, 1083))) <= 12


def test_a_recipe_that_was_let_go_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_RECIPES", 1)
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        for size in (5, 6, 5, 6):
            x = weft.tensor(
                torch.arange(4.0 * size).view(4, size), placement=placement, sbp=weft.split(0)
            )
            assert float(x.sum()) == float(torch.arange(4.0 * size).sum())


def test_no_cache_of_calls_is_without_bound() -> None:
    work_of = [
        each
        for each in gc.get_objects()
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("weft.")
    ]
    with weft.local_world(2):
        before = {id(each): each.cache_info().currsize for each in work_of}
        work(103, 133)
    grown = [
        each
        for each in work_of
        if each.cache_info().currsize >= before[id(each)] + 20 and each.cache_info().maxsize is None
    ]
    assert not grown
