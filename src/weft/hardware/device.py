"""Device: seconds for work and for communication, estimated before anything runs.

Only proportions matter where credits and orders are chosen: which stage is slowest, what a transfer
takes beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.ops import OpCall, flops, traffic
from weft.ops.cost import tensor_bytes
from weft.units import Bytes, Flops, Seconds


@final
@dataclass(frozen=True, slots=True)
class Device:
    """The speeds of one rank's device, in amounts a second.

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

    def work(self, work: Flops, moved: Bytes) -> Seconds:
        """Seconds of a call: it computes while it reads and writes (the roofline model, Williams et al. 2009)."""
        return Seconds(self.start + max(work / self.flops, moved / self.traffic))

    def call(self, call: OpCall) -> Seconds:
        """Seconds of a call with a rule.

        Raises:
            RuleError: when the op has no rule.
        """
        return self.work(flops(call), traffic(call))

    def without_rule(self, call: OpCall) -> Seconds:
        """Seconds of a call that reads and writes its tensors once."""
        tensors = (*call.operands, *(spec for spec in call.results if spec is not None))
        return self.work(Flops(0), Bytes(sum(map(tensor_bytes, tensors))))

    def communication(self, moved: Bytes) -> Seconds:
        """Seconds of a communication in which this device sends or receives `moved` bytes."""
        return Seconds(self.latency + moved / self.link)

    @property
    def bucket(self) -> Bytes:
        """Bytes that are worth a communication of their own: latency is a twentieth of its seconds."""
        return Bytes(round(20 * self.latency * self.link))
