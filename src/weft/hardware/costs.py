"""Costs: seconds of calls, updates and exchanges on the ranks of a machine, from any source.

`DefaultDevice` has a few figures for all ranks, `TopologyCosts` the device kinds and links of a topology,
`MeasuredCosts` what was measured, `CostOverrides` tables that a user gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing import EXCHANGE_BYTES
from weft.errors import RuleError, UserError, wrong
from weft.hardware.devices import read_yaml
from weft.ir.plan_nodes import COLLECTIVE_KINDS, CollectiveKind
from weft.ops import OpCall, flops, traffic
from weft.ops.call import operand, tensor_spec
from weft.ops.cost import tensor_bytes
from weft.ops.weft_ops import WEFT_OPS
from weft.schema import Bounds, OneOf, read
from weft.units import NO_BYTES, NO_TIME, Bytes, Flops, Seconds

# Groups of ranks that run the same collective at the same time.
Groups: TypeAlias = Sequence[Sequence[int]]
# Bytes that go from a rank to a rank, all at the same time.
Sent: TypeAlias = Sequence[tuple[int, int, Bytes]]


class LinkUse(Protocol):
    """The links that a communication needs. Equal ones need the same, and are one where they run at the same time."""

    def busy(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Numbers of resources of the machine, each once, and the seconds in which each is needed whole."""

    def __hash__(self) -> int:
        """The cost of the resources that are used."""


@final
class Cost(NamedTuple):
    """The time of a call, update or exchange.

    Attributes:
        seconds: expected.
        spread: relative standard deviation; 0 if none is known.
        estimate: the name of the guessed figure; "" if all figures were known.
        links: of a communication, those that it may share with others; None if that is not known.
    """

    seconds: Seconds
    spread: float = 0.0
    estimate: str = ""
    links: LinkUse | None = None


@final
class Contention(NamedTuple):
    """Factors by which concurrent calls and communications of one device slow each other down.

    Attributes:
        calls: factor, at least 1, by which a rank's calls take longer while one of its communications runs.
        exchanges: factor, at least 1, by which its communications take longer while calls run.
    """

    calls: Annotated[float, Bounds(least=1)] = 1.0
    exchanges: Annotated[float, Bounds(least=1)] = 1.0


NO_SLOWDOWN = Contention()


@final
@dataclass(frozen=True)
class Capacity:
    """The limits of a rank's device.

    Attributes:
        name: of the device.
        peaks: FLOP/s by dtype; empty if none are known.
        memory: that it has; None if that is not known.
        reserve: bytes of it that are taken before any tensor: context, allocator, communicators.
        slowdown: of concurrent calls and communications.
        drift: relative standard deviation of the device's speed from step to step.
        launched: true if the host only launches calls, and continues to the next step meanwhile.
        step: seconds of the host between the acts of one step and those of the next.
    """

    name: str
    peaks: Mapping[str, float] = field(default_factory=dict)
    memory: Bytes | None = None
    reserve: Bytes = NO_BYTES
    slowdown: Contention = NO_SLOWDOWN
    drift: float = 0.0
    launched: bool = False
    step: Seconds = NO_TIME


class Costs(Protocol):
    """Seconds on the ranks of a machine. Equal arguments give equal answers."""

    def like(self, rank: int) -> int:
        """A rank with the same device: one for all of a kind."""

    def capacity(self, rank: int) -> Capacity:
        """The limits of a rank's device."""

    def of_call(self, rank: int, call: OpCall, lies: Sequence[str] = ()) -> Cost:
        """One call on a rank; of an op without a rule, too.

        Args:
            rank: which.
            call: what it calls.
            lies: for each operand that is a view, its text from `weft.hardware.durations.view_texts`; () if unknown.
        """

    def of_update(self, rank: int, rule: str, moved: Bytes, together: int = 1) -> Cost:
        """An optimizer's update of one variable.

        Args:
            rank: which.
            rule: of the optimizer.
            moved: bytes that it reads and writes.
            together: how many variables one act updates by this rule, which share what starting takes.
        """

    def of_act(self, rank: int) -> Seconds:
        """Overhead of the host for an act of an actor, beyond its calls."""

    def of_collective(
        self, kind: CollectiveKind, size: Bytes, moved: Bytes, groups: Groups
    ) -> Cost:
        """A collective of all groups at the same time.

        Args:
            kind: what runs.
            size: bytes of the larger side on one rank: the input of all_reduce, reduce_scatter and
                all_to_all, the output of all_gather.
            moved: bytes that one rank sends.
            groups: the ranks of each communicator that runs it.
        """

    def of_transfer(self, sent: Sent, moved: Bytes) -> Cost:
        """A transfer between placements.

        Args:
            sent: what all ranks send to one another.
            moved: bytes that one rank sends or receives, whichever is more.
        """


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs that deduction minimises, in bytes that cross between devices. All amounts are sums over all devices.

    Sums, not the slowest device: work that is split costs its whole once, work that is replicated
    costs it on every device. Dividing by the number of devices would change no decision.

    Attributes:
        bytes_per_collective: the cost of one more collective beside its bytes, for its latency.
        bytes_per_flop: what one floating-point operation weighs, in calls with more than one for
            every element read or written; others, such as element-wise ones, are bound by memory
            and weigh their traffic alone. On real devices it is far below 1; it is deliberately
            dear, so that a strategy keeps its meaning at small sizes. With x of (n, k) and w of (k,
            m) in float32, data parallelism pays 2(p-1)·4·k·m bytes to reduce the gradient of w;
            replicating the layer instead pays (p-1)·6·n·k·m flops. At 4 bytes a flop the second is
            more expensive for every n ≥ 1, so no batch is too small for a split that the user asked for.
        bytes_per_traffic: what one byte read or written in a device's memory weighs: enough to
            split element-wise work where that is free, too little to move a tensor for it.
        bytes_per_held: what one byte weighs by which boxing makes a tensor larger, all ranks together:
            an all-gather saves no bytes for nothing if it makes a tensor whole on every rank.
        whole_parameter: for a parameter that the user left free, what splitting it weighs, and what cutting it for
            use where it is whole; for any that is whole, what making its gradient in pieces weighs: in units of the
            bytes that then lie idle, (p-1)·T. Above 2, the price of reducing the gradient, splitting never wins by
            saving that alone, only by what it saves on activations. 0 counts bytes only.
        hints_hold: true if a parameter whose layout the user fixed is used in it wherever an op
            can, whatever that costs; otherwise it is boxed for use where that is cheaper.
        early_reduction: what reducing a partial value weighs when a call reads the result rather
            than an update or the caller, in bytes. Breaks ties between equal reductions along a
            chain of linear ops: late ones can be joined into buckets and need no wait inside the
                chain.
    """

    bytes_per_collective: float = float(EXCHANGE_BYTES)
    bytes_per_flop: float = 4.0
    bytes_per_traffic: float = 0.1
    bytes_per_held: float = 0.5
    whole_parameter: float = 3.0
    hints_hold: bool = True
    early_reduction: float = 1.0

    def boxing(self, moved: Bytes, collectives: int) -> float:
        """Cost of boxing that moves `moved` bytes over all devices in `collectives` collectives."""
        return moved + self.bytes_per_collective * collectives

    def work(self, flops: Flops, traffic: Bytes, item: int = 4) -> float:
        """Cost of calls with `flops` and `traffic` (bytes read and written), both summed over all devices.

        `item` is the size of an element.

        A call costs the larger of its compute and its memory time: a product reads and writes while it computes.
        """
        if flops > traffic / item:
            return self.bytes_per_flop * flops
        return self.bytes_per_traffic * traffic


# Sizes at which a device's rates are read off: of a square product, of a sum, of an all-reduce.
_WIDE, _LONG = 4096, 2**24
_LARGE, _SMALL = Bytes(2**26), Bytes(2**10)


def carried(costs: Costs, ranks: Sequence[int]) -> float:
    """The bytes between devices that some ranks together send in a second: what `seconds_model` counts a second as."""
    moved = _reduced(costs, ranks, _LARGE) - _reduced(costs, ranks, _SMALL)
    return 2 * (len(ranks) - 1) * (_LARGE - _SMALL) / moved


def seconds_model(costs: Costs, ranks: Sequence[int], dtype: str = "float32") -> CostModel:
    """The cost model that minimizes seconds.

    Its unit is still a byte between devices, so seconds are times the bytes that all ranks together send in one. It is
    linear: each call and each exchange counts at the rate of large ones. Parameters that the user left free are laid
    out as is fastest, and copies cost nothing; the layouts that the user fixed are kept.

    Args:
        costs: of the machine.
        ranks: that the step runs on, two at least.
        dtype: of most products.
    """
    first, sent = ranks[0], carried(costs, ranks)
    square, row = tensor_spec((_WIDE, _WIDE), dtype), tensor_spec((_LONG,), dtype)
    operands = operand(0), operand(1)
    product = OpCall("aten.mm.default", operands, (), (square, square), (square,))
    added = OpCall("aten.add.Tensor", operands, (), (row, row), (row,))
    on_all = sent / len(ranks)
    return CostModel(
        bytes_per_collective=sent * _reduced(costs, ranks, _SMALL),
        bytes_per_flop=on_all * costs.of_call(first, product).seconds / flops(product),
        bytes_per_traffic=on_all * costs.of_call(first, added).seconds / traffic(added),
        bytes_per_held=0.0,
        whole_parameter=0.0,
    )


def _reduced(costs: Costs, ranks: Sequence[int], size: Bytes) -> float:
    """Seconds of an all-reduce of all."""
    return costs.of_collective("all_reduce", size, size, [tuple(ranks)]).seconds


# Device: seconds for work and for communication, estimated before anything runs.
#
# Only proportions matter where credits and orders are chosen: which stage is slowest, what a transfer
# takes beside it.


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
        launched: true if calls are only launched by the host and continue by themselves; then a few
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
    """True if a device of this type continues by itself with the work that the host has launched."""
    return DEVICE_TYPES[device_type].launched


# The phase that seconds of a stage or module are for; "weight" is the part of the backward that makes the
# gradients of parameters.
WORK_KINDS = ("forward", "backward", "weight", "update")
EXCHANGE_KINDS = (*COLLECTIVE_KINDS, "transfer")
_Work: TypeAlias = Mapping[Annotated[str, OneOf(WORK_KINDS)], Seconds]


@final
@dataclass(frozen=True)
class CostOverrides:
    """User-defined costs. The larger unit takes precedence: a stage's seconds are those of all modules and ops in it.

    Attributes:
        ops: seconds of one call of an op on a rank, whatever its shapes.
        modules: by name pattern of modules, which must match the whole path: seconds of one
            micro-batch on a rank, by kind of work.
        stages: by stage, or "*" for all others: the same.
        exchanges: seconds of one exchange of a kind, buckets counted as one.
        source: the file.
    """

    ops: Mapping[str, Seconds] = field(default_factory=dict)
    modules: Mapping[str, _Work] = field(default_factory=dict)
    stages: Mapping[str, _Work] = field(default_factory=dict)
    exchanges: Mapping[Annotated[str, OneOf(EXCHANGE_KINDS)], Seconds] = field(default_factory=dict)
    source: str = "given costs"

    def of_stage(self, stage: int) -> Mapping[str, Seconds]:
        """The seconds of a stage, by kind of work; those for all stages where it has none of its own."""
        return self.stages.get(str(stage)) or self.stages.get("*") or {}


def read_cost_overrides(path: str | Path) -> CostOverrides:
    """The costs of a file.

    Raises:
        UserError: when it cannot be read, or a field is unknown or out of range; the message names
            file, key, what was expected and what was given.
    """
    return parse_cost_overrides(read_yaml(Path(path)), str(path))


def parse_cost_overrides(content: Any, where: str) -> CostOverrides:
    """The costs of a file's content; `where` is named in errors.

    Raises:
        UserError: when a field is unknown or out of range.
    """
    found = read(CostOverrides, content, where)
    if not content:
        raise UserError(f"{where} must have one or more of ops, modules, stages, exchanges")
    for name in found.stages:
        if name != "*" and not (name.isascii() and name.isdigit()):
            raise wrong(f"{where}: stages: a key", "a stage's number in quotes, or '*'", name)
    return replace(found, source=where)
