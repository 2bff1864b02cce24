from __future__ import annotations

from weft.hardware import CostModel
from weft.units import Bytes, Flops


def test_boxing_adds_bytes_and_collectives() -> None:
    assert CostModel(bytes_per_collective=10.0).boxing(Bytes(100), 2) == 120.0


def test_dense_work_is_flops() -> None:
    assert CostModel(bytes_per_flop=2.0, bytes_per_traffic=0.5).work(Flops(10), Bytes(4)) == 20.0


def test_elementwise_work_is_traffic() -> None:
    assert CostModel(bytes_per_traffic=0.5).work(Flops(10), Bytes(80)) == 40.0


def test_sums_are_traffic_in_any_dtype() -> None:
    """A sum reads each element once, whatever its size."""
    cost = CostModel(bytes_per_traffic=0.5)
    for item in (2, 4, 8):
        assert cost.work(Flops(100), Bytes(101 * item), item) == 101 * item * 0.5


def test_replicating_a_layer_is_dearer_than_reducing_its_gradient() -> None:
    """The reason for the default of `bytes_per_flop`: it holds for a batch of one row."""
    cost, width, parts = CostModel(), 1024, 2
    product = cost.work(Flops(2 * width * width), Bytes(4 * width * width))
    replicated = (parts - 1) * 3 * product
    assert replicated > cost.boxing(Bytes(2 * (parts - 1) * 4 * width * width), 1)
