from __future__ import annotations

import pytest

from weft.hardware import Device, usual_device
from weft.ops import OpCall, Operand, TensorSpec
from weft.units import Bytes, Flops, Seconds

DEVICE = Device(flops=100.0, traffic=10.0, start=Seconds(1.0), link=5.0, latency=Seconds(2.0))


def test_work_takes_as_long_as_the_slower_of_computing_and_reading() -> None:
    assert DEVICE.work(Flops(400), Bytes(10)) == 5.0
    assert DEVICE.work(Flops(400), Bytes(90)) == 10.0


def test_communication_has_latency() -> None:
    assert DEVICE.communication(Bytes(10)) == 4.0


def test_a_call_is_timed_by_its_rule_or_by_its_tensors() -> None:
    a, b, c = (TensorSpec(shape, "float32") for shape in ((2, 3), (3, 4), (2, 4)))
    product = OpCall("aten.mm.default", (Operand(0), Operand(1)), (), (a, b), (c,))
    assert DEVICE.call(product) == pytest.approx(1 + 4 * (6 + 12 + 8) / 10)
    assert DEVICE.without_rule(product) == DEVICE.call(product)


def test_a_gpu_is_faster_than_a_cpu() -> None:
    cpu, cuda = usual_device("cpu"), usual_device("cuda")
    assert cuda.work(Flops(10**12), Bytes(0)) < cpu.work(Flops(10**12), Bytes(0))
    assert cuda.communication(Bytes(10**9)) < cpu.communication(Bytes(10**9))
