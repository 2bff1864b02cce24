"""The work of a step: seconds of its calls and updates, shared by ranks as evenly as it can be.

Products count at the rate of large ones, all other calls at the rate of the whole tensor: no piece is faster than its
part of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from math import ceil
from typing import TypeVar, final

import numpy as np

from weft.cached import cached_property
from weft.compiler.stages.balance import TOLERANCE
from weft.hardware.costs import Costs
from weft.ops import OpCall, flops
from weft.ops.call import operand, tensor_spec
from weft.ops.rule import aten
from weft.search.candidate_table import CandidateTable, Floats
from weft.search.steps.facts import FEW, MORE, CountedCall, StepFacts
from weft.units import Bytes, Seconds

_K = TypeVar("_K")
_V = TypeVar("_V")


def once(made: dict[_K, _V], key: _K, make: Callable[[], _V]) -> _V:
    """The value of a key, which is made where it is not there yet."""
    if key not in made:
        made[key] = make()
    return made[key]


# A product as large as these is as quick as any, but for its last wave.
_LARGE, _WAVE = 16384, 1.01
# The part of a step that a pipeline's first stage cannot leave for later: all but gradients of weights.
_WAITED = 0.6
# The part of a step's forward that a stage surely waits for, where stages have unlike shares of forward and backward.
_SURELY = 0.9
# Matrix products: no pass leaves them out.
_MATRIX = frozenset(aten("mm addmm bmm baddbmm"))
# Calls of a cross-entropy, which goes over its classes fewer times where these are split.
_LOSS = frozenset(aten("_log_softmax nll_loss_forward nll_loss2d_forward"))
_LOSS |= frozenset(aten("_log_softmax_backward_data nll_loss_backward nll_loss2d_backward"))


@final
@dataclass(frozen=True)
class StepWork:
    """Seconds of a step's work: on one device, or divided over some ranks by their speeds.

    Attributes:
        calls: of all calls, without their starts.
        starts: of the starts of all matrix products; on ranks, of the device that starts them the fastest.
        again: of the products in blocks, when blocks are recomputed.
        all_again: of all recomputed calls.
        update: of all updates.
        losses: of cross-entropies, which take fewer passes where their classes are split.
        forward: of the calls of the forward, but for cross-entropies.
    """

    calls: float
    starts: float
    again: float
    all_again: float
    update: float
    losses: float
    forward: float

    def along(self, other: StepWork, times: float) -> StepWork:
        """On a straight line through the work of two steps."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return StepWork(*(one + times * (two - one) for one, two in pairs))


@final
@dataclass(frozen=True, eq=False)
class SharedWork:
    """The work of one step on one machine."""

    facts: StepFacts
    _seconds: dict[object, float] = field(default_factory=dict, repr=False)
    _shared: dict[int, StepWork] = field(default_factory=dict, repr=False)

    @property
    def _costs(self) -> Costs:
        return self.facts.machine.costs

    @cached_property
    def outside(self) -> float:
        """The part of the calls' seconds that is in no block, on the first device; 0 if that is not known."""
        if len(self.facts.calls) == 1:
            return 0.0
        few, more = (self._work_of(self.facts.ranks[0], calls).calls for calls in self.facts.calls)
        whole = few + self.facts.along * (more - few)
        return max(1 - self._blocks * (more - few) / (MORE - FEW) / max(whole, 1e-30), 0.0)

    def unevenness(self, table: CandidateTable) -> Floats:
        """Seconds of the busiest stage over the mean of all, where stages are cut evenly; 1 without any."""
        return uneven_stages(table, self.facts.parts, self.outside)

    @cached_property
    def of_kind(self) -> Mapping[int, StepWork]:
        """The work of the step on a device of each device kind, by its first rank."""
        kinds = dict.fromkeys(self._costs.like(rank) for rank in self.facts.ranks)
        works = dict[int, StepWork]()
        for first in kinds:
            found = [self._work_of(first, calls) for calls in self.facts.calls]
            one = found[0] if len(found) == 1 else found[0].along(found[1], self.facts.along)
            update = self._costs.of_update(first, "AdamW", self.facts.updated).seconds
            works[first] = replace(one, update=max(update - self._start(first), 0.0))
        return works

    def _work_of(self, first: int, calls: Mapping[CountedCall, int]) -> StepWork:
        start = self._start(first)
        total = starts = again = all_again = losses = forward = 0.0
        for (call, runs_again, in_forward), count in calls.items():
            seconds = max(self._costs.of_call(first, call).seconds - start, 0.0)
            dtype = next((spec.dtype for spec in call.operands if "float" in spec.dtype), "float32")
            if call.op in _MATRIX:
                work = flops(call)
                seconds = min(seconds, work / self._rate(first, dtype)) if work else seconds
                again += count * seconds if runs_again else 0.0
                starts += count * start
            all_again += count * seconds if runs_again else 0.0
            loss = call.op in _LOSS
            losses += count * seconds if loss else 0.0
            forward += count * seconds if in_forward and not loss else 0.0
            total += count * seconds
        return StepWork(
            calls=total,
            starts=starts,
            again=again,
            all_again=all_again,
            update=0.0,
            losses=losses,
            forward=forward,
        )

    def _start(self, first: int) -> float:
        tiny = tensor_spec((1,), "float32")
        call = OpCall("aten.add.Tensor", (operand(0), operand(1)), (), (tiny, tiny), (tiny,))
        return once(
            self._seconds, ("start", first), lambda: self._costs.of_call(first, call).seconds
        )

    def _rate(self, first: int, dtype: str) -> float:
        square = tensor_spec((_LARGE, _LARGE), dtype)
        call = OpCall("aten.mm.default", (operand(0), operand(1)), (), (square, square), (square,))

        def rate() -> float:
            return _WAVE * flops(call) / self._costs.of_call(first, call).seconds

        return once(self._seconds, ("rate", first, dtype), rate)

    def to_host(self, size: Bytes) -> Seconds:
        """Seconds in which the first device sends so many bytes to its host."""
        whole = tensor_spec((max(size // 4, 1),), "float32")
        call = OpCall("weft.offload", (operand(0),), (), (whole,), (whole,))
        return self._costs.of_call(self.facts.ranks[0], call).seconds

    def busy(self, table: CandidateTable, least: bool = False) -> Floats:
        """Seconds of the busiest compute queue; of `least` without what some plan of the candidate can leave out."""
        starts = self._of_ranks(table, lambda each: each.starts)
        update = self._of_ranks(table, lambda each: each.update)
        calls = self._calls(table, least)
        return calls + table.micro_batches * starts / table.stages + update

    def updates_again(self, table: CandidateTable) -> Floats:
        """Seconds in which a rank updates what others update, too: all along the data axis where nothing is sharded."""
        update = self._of_ranks(table, lambda each: each.update)
        return np.where(table.zero == 0, update * (table.data - 1), 0.0)

    def chain(self, table: CandidateTable) -> Floats:
        """Seconds of the longest chain through all stages, at least, by the parts above; 0 without any.

        A stage waits, in each step, for the forward of those before it and, where backward and forward take turns, for
        their backward, but for gradients of weights; of stages of any size, the best balance counts. It
        is 0, too, if parts are not sequential or devices differ.
        """
        calls = self._calls(table, least=True)
        both = table.scheduled("gpipe", "1f1b")
        forward = _SURELY * self._of_ranks(table, lambda each: each.forward)
        waited = np.where(both, _WAITED * calls, np.minimum(forward, _WAITED * calls))
        late = np.where(both, (calls - waited) / table.micro_batches, 0.0)
        # A stage does its part of all micro-batches, and waits before it for one of them in each stage before it. The
        # balance of stages that ends first has all of them end at the same time.
        part = np.minimum(waited / (np.maximum(calls - late, 1e-30) * table.micro_batches), 1.0)
        share = 1 - (1 - part) ** table.stages
        found = waited * table.stages / table.micro_batches / np.maximum(share, 1e-30)
        in_line = self.facts.sequential and len(self.of_kind) == 1
        none = (table.stages == 1) | (table.turns > 1) | (not in_line)
        return np.where(none, 0.0, found)

    def _calls(self, table: CandidateTable, least: bool) -> Floats:
        calls = self._of_ranks(table, lambda each: each.calls)
        again = self._of_ranks(table, lambda each: each.again if least else each.all_again)
        calls += again * table.recompute / self._blocks
        if not least:
            return calls
        losses = self._of_ranks(table, lambda each: each.losses)
        whole = table.laid("data") & (not self.facts.laid and not self.facts.guided)
        return calls - np.where(whole, 0.0, losses)

    @cached_property
    def _blocks(self) -> int:
        return self.facts.blocks.count if self.facts.blocks is not None else 1

    def _of_ranks(self, table: CandidateTable, seconds: Callable[[StepWork], float]) -> Floats:
        every, inverse = np.unique(table.ranks, return_inverse=True)
        found = [
            once(self._shared, int(ranks), partial(self._shared_by, int(ranks))) for ranks in every
        ]
        return np.array([seconds(work) for work in found])[inverse]

    def _shared_by(self, ranks: int) -> StepWork:
        kinds = Counter(self._costs.like(rank) for rank in self.facts.ranks[:ranks])
        works = [(self.of_kind[kind], count) for kind, count in kinds.items()]

        def shared(seconds: Callable[[StepWork], float]) -> float:
            return 1 / sum(count / max(seconds(work), 1e-30) for work, count in works)

        calls = shared(lambda work: work.calls)
        return StepWork(
            calls=calls,
            starts=min(work.starts for work, _ in works),
            again=shared(lambda work: work.calls + work.again) - calls,
            all_again=shared(lambda work: work.calls + work.all_again) - calls,
            update=shared(lambda work: work.update),
            losses=calls - shared(lambda work: work.calls - work.losses),
            forward=shared(lambda work: work.forward),
        )


# The busiest stage of a pipeline against the mean of all, where stages are cut evenly.
#
# As `compiler.stages.balance` cuts them: between blocks, where the most expensive stage is no more expensive than it
# tolerates, else within them. All that is outside of blocks, a head most of it, is in the last stage.


# Pieces of a block that are cut apart: attention and a network.
_PIECES = 2


def unevenness_of(blocks: int, outside: float, stages: int, turns: int) -> float:
    """Seconds of the busiest group of ranks over the mean of all groups, each of which runs so many parts in turn.

    `outside` is the part of the step's seconds that is in no block.
    """
    whole = _busiest(blocks, outside, stages, turns)
    if whole <= TOLERANCE * (1 + 1e-9):
        return whole
    return min(whole, _busiest(_PIECES * blocks, outside, stages, turns))


def uneven_stages(table: CandidateTable, blocks: int, outside: float) -> Floats:
    """The same of candidates; 1 for those without stages."""
    most = int(table.turns.max(initial=0)) + 1
    pairs, inverse = np.unique(table.stages * most + table.turns, return_inverse=True)
    every = [unevenness_of(blocks, outside, *divmod(int(pair), most)) for pair in pairs]
    return np.array(every)[inverse]


def _busiest(units: int, outside: float, stages: int, turns: int) -> float:
    parts = stages * turns
    if stages == 1:
        return 1.0
    unit = (1 - outside) / units

    def busiest(last: int) -> float:
        others = ceil((units - last) / (parts - 1))
        return max(turns * others * unit, ((turns - 1) * others + last) * unit + outside)

    return max(1.0, stages * min(busiest(last) for last in range(units // parts + 1)))
