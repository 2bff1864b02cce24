"""The work of a step: seconds of its calls and updates, shared by ranks as evenly as it can be.

Products count at the rate of large ones, all else at that of the whole tensor: no piece is quicker than its part of the
whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from weft.cached import cached_property
from weft.hardware.costs import Costs
from weft.ops import OpCall, flops
from weft.ops.call import operand, tensor_spec
from weft.search.bounds.once import once
from weft.search.space import Point
from weft.search.steps.facts import StepFacts

# A product as large as these is as quick as any, but for its last wave.
_LARGE, _WAVE = 16384, 1.01
# The part of a step that a pipeline's first stage cannot leave for later: all but gradients of weights.
_WAITED = 0.6
# Matrix products: no pass leaves them out.
_MATRIX = frozenset(
    ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
)
# Calls of a cross-entropy.
_LOSS = frozenset(
    f"aten.{name}.default"
    for name in (
        *("_log_softmax", "nll_loss_forward", "nll_loss_backward"),
        *("_log_softmax_backward_data", "nll_loss2d_forward", "nll_loss2d_backward"),
    )
)


@final
@dataclass(frozen=True)
class StepWork:
    """Seconds of a step's calls on one device of a kind, whole.

    Attributes:
        calls: of all calls, without their starts.
        products: how many matrix products there are.
        again: of the products in blocks that run again when blocks are recomputed.
        update: of all updates.
        losses: of cross-entropies, which take fewer passes where their classes are split.
    """

    calls: float
    products: float
    again: float
    update: float
    losses: float

    def along(self, other: StepWork, times: float) -> StepWork:
        """On a straight line through the work of two steps."""
        pairs = zip(
            (self.calls, self.products, self.again, self.update, self.losses),
            (other.calls, other.products, other.again, other.update, other.losses),
            strict=True,
        )
        return StepWork(*(one + times * (two - one) for one, two in pairs))


@final
@dataclass(frozen=True)
class _Together:
    """Seconds of a step's work on some ranks, where each does as much as it can.

    Attributes:
        calls: of all calls, without their starts.
        again: of those that run again.
        update: of all updates.
        losses: of cross-entropies.
        start: of all products' starts, on the device that starts them the quickest.
    """

    calls: float
    again: float
    update: float
    losses: float
    start: float


@final
@dataclass(frozen=True)
class SharedWork:
    """The work of one step on one machine.

    Attributes:
        facts: of the step.
    """

    facts: StepFacts
    _seconds: dict[object, float] = field(default_factory=dict, repr=False)
    _shared: dict[int, _Together] = field(default_factory=dict, repr=False)

    @property
    def _costs(self) -> Costs:
        return self.facts.machine.costs

    @cached_property
    def of_kind(self) -> Mapping[int, StepWork]:
        """The work of the step on a device of each kind, by its first rank."""
        kinds = dict.fromkeys(self._costs.like(rank) for rank in self.facts.ranks)
        return {first: self._work(first) for first in kinds}

    def _work(self, first: int) -> StepWork:
        found = [self._work_of(first, calls) for calls in self.facts.calls]
        one = found[0] if len(found) == 1 else found[0].along(found[1], self.facts.along)
        update = self._costs.of_update(first, "AdamW", self.facts.updated).seconds
        return replace(one, update=max(update - self._start(first), 0.0))

    def _work_of(self, first: int, calls: Mapping[tuple[OpCall, bool], int]) -> StepWork:
        start = self._start(first)
        total = products = again = losses = 0.0
        for (call, repeats), count in calls.items():
            seconds = max(self._costs.of_call(first, call).seconds - start, 0.0)
            dtype = next((spec.dtype for spec in call.operands if "float" in spec.dtype), "float32")
            if call.op in _MATRIX:
                work = flops(call)
                seconds = min(seconds, work / self._rate(first, dtype)) if work else seconds
                products += count
                again += count * seconds if repeats else 0.0
            losses += count * seconds if call.op in _LOSS else 0.0
            total += count * seconds
        return StepWork(total, products, again, 0.0, losses)

    def _start(self, first: int) -> float:
        tiny = tensor_spec((1,), "float32")
        call = OpCall("aten.add.Tensor", (operand(0), operand(1)), (), (tiny, tiny), (tiny,))
        return once(
            self._seconds, ("start", first), lambda: self._costs.of_call(first, call).seconds
        )

    def _rate(self, first: int, dtype: str) -> float:
        """FLOP/s of the largest products."""
        square = tensor_spec((_LARGE, _LARGE), dtype)
        call = OpCall("aten.mm.default", (operand(0), operand(1)), (), (square, square), (square,))

        def rate() -> float:
            return _WAVE * flops(call) / self._costs.of_call(first, call).seconds

        return once(self._seconds, ("rate", first, dtype), rate)

    def busy(self, point: Point, least: bool = False) -> float:
        """Seconds of the busiest compute queue.

        Args:
            point: of the space.
            least: without what some plan of the point can leave out.
        """
        together = self._together(point.ranks)
        calls = self._calls(point, least)
        return calls + point.micro_batches * together.start / point.stages + together.update

    def chain(self, point: Point) -> float:
        """Seconds of the longest chain through all stages, at least; 0 without any.

        A stage waits, in each step, for the forward of those before it and for their backward, but for gradients
        of weights; of stages of any size, the best balance counts.
        """
        m, s = point.micro_batches, point.stages
        if point.schedule in ("", "zero_bubble") or s == 1:
            return 0.0
        return _WAITED * self._calls(point, least=True) * s / m / (1 - (1 - 1 / m) ** s)

    def _calls(self, point: Point, least: bool) -> float:
        """Seconds of calls without their starts."""
        together = self._together(point.ranks)
        calls = together.calls + (together.again if point.recompute else 0.0)
        return calls - (together.losses if least and point.layouts != "data" else 0.0)

    def _together(self, ranks: int) -> _Together:
        """The work of the step on the first ranks, divided by how quick each is."""
        if ranks not in self._shared:
            kinds = Counter(self._costs.like(rank) for rank in self.facts.ranks[:ranks])
            works = [(self.of_kind[kind], count) for kind, count in kinds.items()]

            def shared(seconds: Callable[[StepWork], float]) -> float:
                return 1 / sum(count / max(seconds(work), 1e-30) for work, count in works)

            whole = shared(lambda work: work.calls)
            with_again = shared(lambda work: work.calls + work.again)
            self._shared[ranks] = _Together(
                whole,
                with_again - whole,
                shared(lambda work: work.update),
                whole - shared(lambda work: work.calls - work.losses),
                min(self._start(kind) * self.of_kind[kind].products for kind in kinds),
            )
        return self._shared[ranks]
