"""Device: seconds for work and for communication, estimated before anything runs.

Only proportions matter where credits and orders are chosen: which stage is slowest, what a transfer
takes beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import final

from weft.errors import RuleError
from weft.hardware.costs import Capacity, Cost, Groups, Sent
from weft.ir.plan_nodes import CollectiveKind
from weft.ops import OpCall, flops, traffic
from weft.ops.cost import tensor_bytes
from weft.ops.weft_ops import WEFT_OPS
from weft.units import Bytes, Flops, Seconds


@final
@dataclass(frozen=True, slots=True)
class DefaultDevice:
    """The speeds of one rank's device, in amounts a second. They are `Costs` of all ranks alike.

    Attributes:
        flops: floating-point operations a second.
        traffic: bytes a second that it reads and writes in its own memory.
        start: seconds that any call takes.
        link: bytes a second from or to another device.
        latency: seconds that any communication takes.
    """

    flops: float
    traffic: float
    start: Seconds
    link: float
    latency: Seconds

    def like(self, rank: int) -> int:
        return 0

    def capacity(self, rank: int) -> Capacity:
        return Capacity("usual device")  # with one speed for all dtypes

    def of_call(self, rank: int, call: OpCall, lies: Sequence[str] = ()) -> Cost:
        """It computes while it reads and writes (the roofline model, Williams et al. 2009).

        A call whose op has no rule reads and writes its tensors once.
        """
        own = WEFT_OPS.get(call.op)
        call = replace(call, op=own.like) if own and own.like else call
        try:
            work, moved = flops(call), traffic(call)
        except RuleError:
            tensors = (*call.operands, *(spec for spec in call.results if spec is not None))
            work, moved = Flops(0), Bytes(sum(map(tensor_bytes, tensors)))
        return Cost(Seconds(self.start + max(work / self.flops, moved / self.traffic)))

    def of_update(self, rank: int, rule: str, moved: Bytes, together: int = 1) -> Cost:
        return Cost(Seconds(self.start + moved / self.traffic))

    def of_act(self, rank: int) -> Seconds:
        return Seconds(0.0)  # `start` stands for it

    def of_collective(
        self, kind: CollectiveKind, size: Bytes, moved: Bytes, groups: Groups
    ) -> Cost:
        """All links are alike, and nobody shares one."""
        return Cost(Seconds(self.latency + moved / self.link))

    def of_transfer(self, sent: Sent, moved: Bytes) -> Cost:
        """All links are alike, and nobody shares one."""
        return Cost(Seconds(self.latency + moved / self.link))


# The links between hosts: of what was measured, the usual kind that is nearest.
#
# Plans depend on these figures, so they must not change from run to run with the noise of a measurement.


# Bits a second, in units of 10^9.
_GIGABITS = (0.1, 1.0, 2.5, 10.0, 25.0, 100.0, 400.0)
# A factor of 5 apart, which is more than noise.
_LATENCIES = (2e-5, 1e-4, 5e-4, 2.5e-3, 1.25e-2)
_BYTES_PER_GIGABIT = 1e9 / 8


def linked(device: DefaultDevice, bytes_per_second: float, latency: Seconds) -> DefaultDevice:
    """A device behind links of the usual kind nearest to what was measured."""
    gigabits = _nearest(_GIGABITS, bytes_per_second / _BYTES_PER_GIGABIT)
    usual = Seconds(_nearest(_LATENCIES, latency))
    return replace(device, link=gigabits * _BYTES_PER_GIGABIT, latency=usual)


def links_text(device: DefaultDevice) -> str:
    """Bandwidth and latency, in words."""
    return f"{device.link / _BYTES_PER_GIGABIT:g} Gbit/s, {device.latency * 1e3:g} ms"


def _nearest(usual: Sequence[float], found: float) -> float:
    return min(usual, key=lambda each: abs(log(each) - log(max(found, 1e-12))))


@final
@dataclass(frozen=True, slots=True)
class DeviceType:
    """A device type.

    Attributes:
        usual: what such a device does in a second, of the order of its usual members.
        launched: true where calls are only launched by the host and go on by themselves; then a few
            large ones are better than many small ones.
    """

    usual: DefaultDevice
    launched: bool


DEVICE_TYPES = {
    "cpu": DeviceType(
        DefaultDevice(
            flops=3e10, traffic=1e10, start=Seconds(4e-6), link=2e9, latency=Seconds(1e-4)
        ),
        launched=False,
    ),
    "cuda": DeviceType(
        DefaultDevice(
            flops=1e14, traffic=1.5e12, start=Seconds(5e-6), link=1e11, latency=Seconds(2e-5)
        ),
        launched=True,
    ),
}


def default_device(device_type: str) -> DefaultDevice:
    """The figures of a device type."""
    return DEVICE_TYPES[device_type].usual


def is_launched(device_type: str) -> bool:
    """True where a device of this type goes on by itself with the work that the host has launched."""
    return DEVICE_TYPES[device_type].launched
