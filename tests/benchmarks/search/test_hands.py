"""Strategies by hand take all devices, each once, in numbers that divide."""

from __future__ import annotations

from math import prod

from benchmarks.search.hands import GPT_SHAPE, Hand, Shape, by_hand, simulated
from search.jobs import layers


def test_each_takes_all_devices_and_no_two_are_alike() -> None:
    shape = Shape(GPT_SHAPE.columns, GPT_SHAPE.rows, blocks=4, samples=32)
    found = dict(by_hand(8, shape))
    assert {"data parallel", "ZeRO 3", "data 4 x tensor 2", "data 1 x tensor 8"} <= found.keys()
    assert "data 2 x tensor 2 x 2 stages, 1f1b, 4 micro-batches" in found
    assert not any("8 stages" in name for name in found)
    for name, strategy in found.items():
        assert prod(strategy.grid) == 8, name
    assert len({str(each) for each in found.values()}) == len(found)


def test_samples_that_do_not_divide_are_left_out() -> None:
    found = dict(by_hand(4, Shape(blocks=4, samples=6)))
    assert not any("stages" in name for name in found)


def test_what_cannot_be_planned_says_why() -> None:
    plans = dict(by_hand(2, Shape(("0",), ("2",), blocks=2, samples=8)))
    plain = simulated(layers(), "h100x2", "plain", plans["data parallel"])
    assert isinstance(plain, Hand)
    assert plain.fits
    assert plain.seconds > 0
    assert plain.memory > 0
    wrong = simulated(layers(), "h100x1", "wrong", plans["data parallel"])
    assert isinstance(wrong, str)
    assert wrong.startswith("wrong: the grid 2 has 2 ranks")
