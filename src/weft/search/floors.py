"""The least that a strategy can take, in seconds and bytes, before it is planned; and what it will take, about.

Floors are of what no plan of a point can leave out: the calls of the step, in pieces; the update; gradients that
are added up over the data axis; sums of layers that are cut by rows. Products count at the rate of large ones, all
else at that of the whole tensor: no piece is quicker than its part of the whole. Queues run side by side, so the
longest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from weft.cached import cached_property
from weft.hardware.costs import Costs
from weft.hardware.topology_costs import TopologyCosts
from weft.hardware.usual.device import Device
from weft.ir.plan_nodes import CollectiveKind
from weft.ops import OpCall, flops
from weft.ops.call import operand, tensor_spec
from weft.search.facts import StepFacts
from weft.search.space import Point
from weft.units import Bytes, Seconds

# A product as large as these is as quick as any, but for its last wave.
_LARGE, _WAVE = 16384, 1.01
# Bytes of a gradient's element on its way, at least.
_NARROW = 2


@final
@dataclass(frozen=True)
class StepWork:
    """Seconds of a step's calls on one device of a kind, whole.

    Attributes:
        calls: of all calls, without their starts.
        products: how many matrix products there are.
        again: of the products in blocks that run again when blocks are recomputed.
        update: of all updates.
    """

    calls: float
    products: float
    again: float
    update: float

    def along(self, other: StepWork, times: float) -> StepWork:
        """On a straight line through the work of two steps."""
        pairs = zip(
            (self.calls, self.products, self.again, self.update),
            (other.calls, other.products, other.again, other.update),
            strict=True,
        )
        return StepWork(*(one + times * (two - one) for one, two in pairs))


@final
@dataclass(frozen=True)
class Floors:
    """Floors of points for one step on one machine.

    Attributes:
        facts: of the step.
        costs: of the machine.
        ranks: that may be used.
        limit: bytes of memory of a device, with what it reserves; None where that is not known.
    """

    facts: StepFacts
    costs: Costs
    ranks: tuple[int, ...]
    limit: int | None
    _seconds: dict[object, float] = field(default_factory=dict, repr=False)

    @cached_property
    def exact(self) -> bool:
        """True where pieces of calls are known to be no quicker than their part of the whole."""
        return isinstance(self.costs, TopologyCosts | Device)

    @cached_property
    def work(self) -> Mapping[int, StepWork]:
        """The work of the step on a device of each kind, by its first rank."""
        kinds = dict.fromkeys(self.costs.like(rank) for rank in self.ranks)
        return {first: self._work(first) for first in kinds}

    def _work(self, first: int) -> StepWork:
        found = [self._work_of(first, calls) for calls in self.facts.calls]
        one = found[0] if len(found) == 1 else found[0].along(found[1], self.facts.along)
        update = self.costs.of_update(first, "AdamW", self.facts.updated).seconds
        return StepWork(one.calls, one.products, one.again, max(update - self._start(first), 0.0))

    def _work_of(self, first: int, calls: Mapping[tuple[OpCall, bool], int]) -> StepWork:
        start = self._start(first)
        total = products = again = 0.0
        for (call, repeats), count in calls.items():
            seconds = max(self.costs.of_call(first, call).seconds - start, 0.0)
            dtype = next((spec.dtype for spec in call.operands if "float" in spec.dtype), "float32")
            if call.op in _MATRIX:
                work = flops(call)
                seconds = min(seconds, work / self._rate(first, dtype)) if work else seconds
                products += count
                again += count * seconds if repeats else 0.0
            total += count * seconds
        return StepWork(total, products, again, 0.0)

    def _start(self, first: int) -> float:
        tiny = tensor_spec((1,), "float32")
        call = OpCall("aten.add.Tensor", (operand(0), operand(1)), (), (tiny, tiny), (tiny,))
        return self._kept(("start", first), lambda: self.costs.of_call(first, call).seconds)

    def _rate(self, first: int, dtype: str) -> float:
        """FLOP/s of the largest products."""
        square = tensor_spec((_LARGE, _LARGE), dtype)
        call = OpCall("aten.mm.default", (operand(0), operand(1)), (), (square, square), (square,))

        def rate() -> float:
            return _WAVE * flops(call) / self.costs.of_call(first, call).seconds

        return self._kept(("rate", first, dtype), rate)

    def _kept(self, key: object, make: Callable[[], float]) -> float:
        if key not in self._seconds:
            self._seconds[key] = make()
        return self._seconds[key]

    def least(self, point: Point) -> Seconds:
        """Seconds that a step of this point takes at least."""
        if not self.exact:
            return self._peaks(point)
        chain, busy = self._computing(point)
        return Seconds(max(chain, busy, self._reduction(point), self._sums(point)))

    def estimate(self, point: Point) -> Seconds:
        """Seconds that a step takes about: exchanges are half hidden, starts and bubbles count."""
        chain, busy = self._computing(point)
        if point.recompute:
            busy, chain = 4 / 3 * busy, 4 / 3 * chain
        waiting = self._sums(point) * (0.7 if point.layouts == "sequence" else 1.0)
        reduced = self._reduction(point) * (1.5 if point.zero == 3 else 1.0)
        even = busy * (1 + (point.stages - 1) / point.micro_batches)
        late = max(chain, even) + waiting + max(reduced - busy / 2, 0.05 * reduced)
        return Seconds(late * (1.0 if self._likely(point) <= (self.limit or late) else 10.0))

    def _likely(self, point: Point) -> float:
        """Bytes that a rank takes about."""
        flying = (
            min(point.stages, point.micro_batches)
            if point.schedule != "gpipe"
            else point.micro_batches
        )
        part = point.stages * point.data * point.tensor * point.micro_batches
        kept = self.facts.kept * (0.15 if point.recompute else 1.0)
        return self.states(point) + kept * flying / part

    def _peaks(self, point: Point) -> Seconds:
        """The operations of the step over those that all devices can do in a second, in any dtype."""
        peaks = [max(self.costs.capacity(rank).peaks.values(), default=0.0) for rank in self.ranks]
        used = sum(sorted(peaks)[::-1][: point.ranks])
        return Seconds(self.facts.flops / used if all(peaks) and used else 0.0)

    def _computing(self, point: Point) -> tuple[float, float]:
        """Seconds of the longest chain through all stages, and of the busiest compute queue.

        A stage waits, in each step, for the forward of those before it and, unless it makes gradients of
        weights meanwhile, for their backward; of stages of any size, the best balance counts.
        """
        m, s = point.micro_batches, point.stages
        speed = again = start = update = 0.0
        for rank in self._used(point):
            work = self.work[self.costs.like(rank)]
            speed += 1 / max(work.calls, 1e-30)
            again += 1 / max(work.calls + work.again, 1e-30)
            update += 1 / max(work.update, 1e-30)
            start = max(start, self._start(rank) * work.products / s)
        calls = 1 / (again if point.recompute else speed)
        busy = calls + m * start + 1 / update
        free = point.schedule == "zero_bubble" or (s > 1 and not point.schedule)
        chain = 0.0 if free or s == 1 else calls * s / m / (1 - (1 - 1 / m) ** s)
        return chain, busy

    def _used(self, point: Point) -> tuple[int, ...]:
        return self.ranks[: point.ranks]

    def _reduction(self, point: Point) -> float:
        """Seconds in which gradients of weights are added up along the data axis."""
        if point.data == 1 or point.layouts == "free":
            return 0.0
        size = Bytes(int(self.facts.weights * _NARROW / (point.tensor * point.stages)))
        kind: CollectiveKind = "reduce_scatter" if point.zero else "all_reduce"
        return self._collective(kind, size, point, along_data=True)

    def _sums(self, point: Point) -> float:
        """Seconds in which layers that are cut by rows, and the backward of those cut by columns, are added up."""
        if point.layouts not in ("columns", "sequence"):
            return 0.0
        linears, facts = self.facts.linears, self.facts
        size = facts.rows * linears.width * facts.item / (point.data * point.micro_batches)
        times = 2 * linears.sums * point.micro_batches / point.stages
        return times * self._collective("all_reduce", Bytes(int(size)), point, along_data=False)

    def _collective(
        self, kind: CollectiveKind, size: Bytes, point: Point, along_data: bool
    ) -> float:
        groups = self._groups(point, along_data)
        if len(groups[0]) == 1:
            return 0.0
        parts = len(groups[0])
        moved = size * (parts - 1) // parts * (2 if kind == "all_reduce" else 1)
        grid = point.data, point.tensor, point.stages, point.outer
        key = kind, size, grid, along_data
        return self._kept(
            key, lambda: self.costs.of_collective(kind, size, Bytes(moved), groups).seconds
        )

    def _groups(self, point: Point, along_data: bool) -> list[tuple[int, ...]]:
        """The ranks of each communicator along an axis."""
        inner = point.data if point.outer else point.tensor
        whole = point.data * point.tensor
        strided = along_data != point.outer
        found = []
        for first in range(0, point.ranks, whole):
            own = self.ranks[first : first + whole]
            if strided:
                found += [own[place::inner] for place in range(inner)]
            else:
                found += [own[place : place + inner] for place in range(0, whole, inner)]
        return found

    def states(self, point: Point) -> float:
        """Bytes of parameters and optimizer states on a rank, and what its device reserves, at least."""
        facts, cut = self.facts, point.tensor if point.layouts != "data" else 1
        shards = point.data if point.zero else 1
        states = facts.states / cut / shards
        held = facts.parameters / cut / (point.data if point.zero == 3 else 1)
        if point.layouts == "free":
            states, held = states / point.data, held / point.data
        return (states + held) / point.stages + self.costs.capacity(self.ranks[0]).reserve

    def memory(self, point: Point) -> Bytes:
        """Bytes that a rank takes at least."""
        return Bytes(int(self.states(point)))


# Matrix products, attention and convolutions: no pass leaves them out.
_MATRIX = frozenset(
    ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
)
