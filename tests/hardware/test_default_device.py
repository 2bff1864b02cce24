from __future__ import annotations

import pytest

from weft.hardware import DefaultDevice, default_device
from weft.ops import OpCall, Operand, TensorSpec
from weft.units import Bytes, Seconds

DEVICE = DefaultDevice(
    flops=100.0, traffic=10.0, start=Seconds(1.0), link=5.0, latency=Seconds(2.0)
)
A, B, C = (TensorSpec(shape, "float32") for shape in ((2, 3), (3, 4), (2, 4)))
PRODUCT = OpCall("aten.mm.default", (Operand(0), Operand(1)), (), (A, B), (C,))


def test_a_call_takes_as_long_as_the_slower_of_computing_and_reading() -> None:
    assert DEVICE.of_call(0, PRODUCT).seconds == pytest.approx(1 + 4 * (6 + 12 + 8) / 10)
    slow = DefaultDevice(1.0, 10.0, Seconds(1.0), 5.0, Seconds(2.0))
    assert slow.of_call(0, PRODUCT).seconds == 1 + 2 * 2 * 3 * 4


def test_a_call_without_a_rule_reads_and_writes_its_tensors() -> None:
    unknown = OpCall("aten.none", PRODUCT.args, (), (A, B), (C,))
    assert DEVICE.of_call(3, unknown).seconds == pytest.approx(1 + 4 * (6 + 12 + 8) / 10)


def test_updates_read_and_write() -> None:
    assert DEVICE.of_update(0, "SGD", Bytes(90)).seconds == 10.0


def test_communication_has_latency() -> None:
    assert DEVICE.of_transfer([(0, 1, Bytes(10))], Bytes(10)).seconds == 4.0
    assert DEVICE.of_collective("all_reduce", Bytes(40), Bytes(10), [(0, 1)]).seconds == 4.0
    assert (DEVICE.like(7), DEVICE.of_act(7)) == (0, 0.0)
    assert DEVICE.capacity(0).memory is None


def test_a_gpu_is_faster_than_a_cpu() -> None:
    cpu, cuda = default_device("cpu"), default_device("cuda")
    size = Bytes(10**9)
    sent = [(0, 1, size)]
    large = TensorSpec((4096, 4096), "float32")
    call = OpCall("aten.mm.default", (Operand(0), Operand(1)), (), (large, large), (large,))
    assert cuda.of_call(0, call).seconds < cpu.of_call(0, call).seconds
    assert cuda.of_transfer(sent, size).seconds < cpu.of_transfer(sent, size).seconds
