"""The estimate of candidates: a roofline, times the measured ratio of similar candidates to their roofline.

The roofline has the terms of lower bounds, and those that lower bounds leave
out: bubbles, and exposed exchanges. The nearest candidate that was planned, or probed with small steps
    (`weft.search.evaluator`), gives the correction; for a pipeline this can be the same candidate without stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple, final

import numpy as np

from weft.cached import cached_property
from weft.compiler.schedule.priorities import AHEAD
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable, Floats, Ints, Mask
from weft.search.evaluator import Probes
from weft.search.lower_bounds import LowerBounds
from weft.search.measures import Answer, Measures, Unplannable, along
from weft.search.record import Learned, Probe
from weft.search.steps.facts import FEW, MORE
from weft.search.tuning import (
    ABOUT,
    BETWEEN,
    COMPUTED,
    FILLED,
    FREE,
    HIDING,
    LIKELY,
    STAGED,
    UNKNOWN,
)
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds


@final
class CandidateRoofline(NamedTuple):
    """Candidates before any measurement.

    Attributes:
        seconds: of a step, with room or without.
        states: bytes of parameters and optimizer states on a rank, with what its device reserves.
        beside: bytes that a rank holds beside these.
        traits: [candidates, `_TRAITS`], in what candidates are alike.
        samples: of a micro-batch on a rank, as a power of two.
    """

    seconds: Floats
    states: Floats
    beside: Floats
    traits: Ints
    samples: Floats


# In what candidates are alike, and how far apart two are that differ in it; one doubling of samples counts as 1.
_TRAITS = {
    "layouts": 32,
    "uneven": 32,
    "experts": 16,
    "tensor": 16,
    "outer": 16,
    "again": 8,
    "gathers": 4,
    "staged": 4,
    "zero": 1,
    "schedule": 1,
    "turns": 1,
}
_APART = np.array(tuple(_TRAITS.values()))


def roofline(table: CandidateTable, bounds: LowerBounds) -> CandidateRoofline:
    """The roofline of candidates."""
    traits, samples = _traits(table, bounds.facts.samples)
    wide = table.laid("free") & (table.tensor > 1)
    # The batch split over all ranks stands for layouts that deduction finds on two axes.
    rows = table.laid_as("free", "data").rows
    rows[wide] = table.where(wide).data_parallel().rows
    flat = CandidateTable(rows)
    seconds = _seconds(flat, bounds) * np.where(wide, FREE, 1.0)
    return CandidateRoofline(seconds, bounds.states(table), _beside(flat, bounds), traits, samples)


def _traits(table: CandidateTable, samples: int) -> tuple[Ints, Floats]:
    parts = table.data * table.micro_batches
    found = {
        "layouts": table.layouts,
        "uneven": samples % parts > 0,
        "experts": table.experts,
        "tensor": table.tensor,
        "outer": table.outer,
        "again": table.recompute + 2 * table.offload > 0,
        "gathers": table.zero == 3,
        "staged": table.stages > 1,
        "zero": table.zero,
        "schedule": table.schedule,
        "turns": table.turns > 1,
    }
    return np.stack([found[name] for name in _TRAITS], axis=1), np.log2(samples // parts + 1)


def _seconds(table: CandidateTable, bounds: LowerBounds) -> Floats:
    work, exchanges, samples = bounds.work, bounds.exchanges, bounds.facts.samples
    m, stages, uneven = table.micro_batches, table.stages, work.unevenness(table)
    filled = np.where(_puts_off(table), FILLED, 1.0)
    # A micro-batch goes through all stages, one after the other: with few of them nothing fills the others' time.
    late = np.maximum((stages - 1) / (m * table.turns) * filled, stages / m - uneven)
    busy, facts = work.busy(table) * table.unevenness(samples), bounds.facts
    if facts.blocks is not None and table.offload.any():  # to the host and back
        part = table.offload / facts.blocks.count / table.ranks
        busy = busy + 2 * work.to_host(Bytes(int(facts.kept))) * part
    # A gather of parameters takes as long as a reduction to shards. With ZeRO 1 there is one of each in a step, with
    # ZeRO 2 a reduction in each micro-batch, with ZeRO 3 also a gather in its forward and one in its backward.
    levels = [table.zero == level for level in (1, 2, 3)]
    reduced = exchanges.reduction(table) * np.select(levels, [np.full_like(m, 2), m + 1, 3 * m], 1)
    exposed = np.maximum(reduced - HIDING * busy, 0.0) + work.updates_again(table)
    times = np.where(samples % (table.data * m) > 0, UNKNOWN, 1.0)
    found: Floats = times * ((busy + exchanges.sums(table)) * (uneven + late) + exposed)
    return found


def _beside(table: CandidateTable, bounds: LowerBounds) -> Floats:
    """Bytes that a rank holds beside parameters, states and what its device reserves."""
    m, s, facts = table.micro_batches, table.stages, bounds.facts
    count = facts.blocks.count if facts.blocks is not None else 1
    # The first group of ranks holds the most micro-batches, of all its parts together.
    most = s + np.where(table.turns > 1, (s - 1) / table.turns, 0)
    flying = np.where(table.scheduled("gpipe"), m, np.minimum(most, m))
    given = facts.base.in_flight
    flying = flying if given is None else np.minimum(max(given), m)
    again = (table.recompute + table.offload) / count * ~(_puts_off(table) & (table.turns == 1))
    # The memory that stays under recompute takes two plans to know: where all have room it does not matter.
    away = facts.kept - facts.kept_again if again.any() and bounds.is_tight else 0.0
    kept = facts.kept - away * again
    cut = s * np.where(table.laid("data"), 1, table.tensor)
    narrow = facts.parameters * facts.narrowed
    whole = np.where((table.zero == 1) | (table.zero == 2), narrow * (1 - 1 / table.data), 0.0)
    # Sums of several micro-batches are there as long as these are; those of one are in what is kept.
    summed = np.where(m > 1, facts.trained / np.where(table.zero < 2, 1, table.data), 0.0)
    ahead = np.minimum(AHEAD * (2 * table.turns - 1) * s / count, 1) * narrow
    gathered = np.where((table.zero == 3) & (s > 1), ahead, 0.0)
    # Layers cut by columns and rows leave what is between them whole on each rank of the tensor axis.
    between = BETWEEN * (table.laid("columns") & (table.tensor > 1))
    held = (between + (1 - between) / table.tensor) / (s * table.data * m)
    found: Floats = kept * flying * held + (whole + summed + gathered) / cut
    return found


def _puts_off(table: CandidateTable) -> Mask:
    """True for pipelines that may put gradients of weights off: what runs again for a backward is there until these."""
    found: Mask = (table.stages > 1) & table.scheduled("", "zero_bubble")
    return found


@final
class _Measured(NamedTuple):
    """A measured candidate, relative to its roofline.

    Attributes:
        seconds: relative to the roofline's.
        memory: bytes beside states, relative to the roofline's.
        most: bytes that candidates like it hold at most over their roofline.
        planned: true if it was planned whole, false if it was probed with small steps.
    """

    traits: Ints
    samples: float
    seconds: float
    memory: float
    most: float
    planned: bool


@final
class _Corrected:
    """Rooflines of candidates, times what the nearest that was measured took over its own; among equals the latest
    counts.
    """

    def __init__(self, table: CandidateTable, bounds: LowerBounds) -> None:
        self.rough, self._stages = roofline(table, bounds), table.stages
        self._far = np.full(len(table), inf)
        self._times = np.ones((3, len(table)))
        self._planned: Mask = np.zeros(len(table), np.bool_)
        self._seen = 0

    def now(self, measured: Sequence[_Measured]) -> tuple[Floats, Floats]:
        """Seconds of steps, and bytes on a rank."""
        rough = self.rough
        for each in measured[self._seen :]:
            far = (rough.traits != each.traits) @ _APART + np.abs(rough.samples - each.samples)
            nearer = far <= self._far
            self._far[nearer] = far[nearer]
            self._times[:, nearer] = [[each.seconds], [each.memory], [each.most]]
            self._planned[nearer] = each.planned
        self._seen = len(measured)
        seconds, memory, most = self._times
        over = np.minimum((memory - 1) * rough.beside, most)
        return rough.seconds * seconds, rough.states + rough.beside + over

    @property
    def margin(self) -> Floats:
        """Factor on the bytes of candidates: more for pipelines until one near is planned."""
        apart = (self._stages > 1) & (self._far >= _TRAITS["staged"])
        return np.where(apart, STAGED, 1.0)

    @property
    def spare(self) -> Floats:
        """Factor on the room that candidates surely need: more until the nearest that was measured is a whole plan."""
        return np.where(self._planned, 1.0, LIKELY)


@final
class MemoryOutlook:
    """Estimates of some candidates, improved by each measurement.

    Candidates of which all blocks run again, or wait, stand for those with as few of them as give room: those are
    planned in their place, where the step has small ones.
    """

    def __init__(self, table: CandidateTable, estimates: Estimates) -> None:
        bounds, blocks = estimates.lower_bounds, estimates.blocks
        self._estimates = estimates
        several = blocks > 0 and bounds.limit is not None and bounds.facts.small is not None
        self._again: Mask = (table.recompute + table.offload == blocks) & several
        self._own = _Corrected(table, bounds)
        self._kept = _Corrected(table.where(self._again).with_all_kept(), bounds)

    def memory(self) -> Floats:
        """Bytes on a rank."""
        return self._own.now(self._estimates.measured)[1]

    @property
    def spare(self) -> Floats:
        """Factor on the room that candidates surely need."""
        self._own.now(self._estimates.measured)
        return self._own.spare

    def over(self) -> Floats:
        """Bytes over the room that there is: at most 1 where a candidate should fit."""
        return self._estimates.over(self.memory(), self._own.margin)

    def seconds(self, as_few: Mask | None = None) -> Floats:
        """Seconds of steps by which candidates are ordered: more where room is lacking, the more so.

        Args:
            as_few: false for candidates that stand for themselves, with all blocks that run again; by default all do
                not.
        """
        seconds, memory = self._own.now(self._estimates.measured)
        # Candidates that lack little memory come a little later, all others at the end.
        over = self._estimates.over(memory, self._own.margin)
        order = seconds * np.where(over > ABOUT, 1e3 * over, np.maximum(over, 1.0))
        again = self._again if as_few is None else self._again & as_few
        if again.any():
            few = again[self._again]
            none, most = (each[few] for each in self._kept.now(self._estimates.measured))
            room = self._estimates.room((self._own.margin * self._own.spare)[again])
            part = np.clip((most - room) / np.maximum(most - memory[again], 1.0), 0.0, 1.0)
            with_fewer = none + part * (seconds[again] - none)
            order[again] = np.where((part > 0) & (part < 1), with_fewer, order[again])
        return order


@final
class Estimates:
    """Estimates of candidates, improved by each measurement.

    Attributes:
        measured: what candidates took over their rooflines.
        looks: probes so far of candidates without stages, with those of an earlier search.
    """

    def __init__(
        self,
        bounds: LowerBounds,
        small: Probes,
        strategy: Callable[[Candidate], Strategy],
        learned: Learned,
    ) -> None:
        self.lower_bounds, self._small, self._strategy = bounds, small, strategy
        self.learned, self.measured = learned, list[_Measured]()
        self.looks: dict[Candidate, Probe] = dict(learned.looks)
        for flat, look in learned.looks.items():
            self.learn(flat, look.answer, planned=False)
        for candidate, answer in learned.candidates.items():
            self.learn(candidate, answer)

    @cached_property
    def blocks(self) -> int:
        """Blocks that come again; 0 without any."""
        found = self.lower_bounds.facts.blocks
        return found.count if found is not None else 0

    def over(self, memory: Floats, margin: Floats) -> Floats:
        """Bytes over those that there are, beside what devices reserve: above 1 a candidate should have no room.

        Args:
            memory: bytes of candidates by estimate, with what devices reserve.
            margin: times as many bytes that they may take.
        """
        return (memory - self.lower_bounds.reserve) / np.maximum(
            self.room(margin) - self.lower_bounds.reserve, 1
        )

    def room(self, margin: Floats) -> Floats:
        """Bytes that candidates may take by estimate, with what devices reserve."""
        limit, reserve = self.lower_bounds.limit, self.lower_bounds.reserve
        room = inf if limit is None else max(limit - reserve, 1)
        return reserve + room / margin

    def of(self, table: CandidateTable) -> MemoryOutlook:
        """The estimates of some candidates."""
        return MemoryOutlook(table, self)

    def learn(self, candidate: Candidate, found: Answer | None, planned: bool = True) -> None:
        """Correct the estimates of similar candidates by a measurement; candidates similar to a refused one are
        postponed.

        Args:
            candidate: the planned candidate.
            found: measured by a plan, or by small steps if not `planned`.
        """
        if found is None:
            return
        own = _Corrected(CandidateTable.of([candidate]), self.lower_bounds)
        rough = own.rough
        seconds, memory = own.now(self.measured)
        if isinstance(found, Unplannable):
            if candidate.tensor == 1:
                return
            seconds *= UNKNOWN
        else:
            seconds, memory = np.array([found.seconds]), np.array([found.memory])
        times = float(seconds[0]) / max(float(rough.seconds[0]), 1e-30)
        held = max(float(memory[0] - rough.states[0]), 1.0)
        beside = max(float(rough.beside[0]), 1.0)
        # If only the batch is cut, activations are those of one device. Other memory, such as gathered weights and
        # whole gradients, is the same for more samples.
        as_alone = candidate.layouts == "data" and candidate.stages == 1
        most = max(held - beside, 0.0) if as_alone else inf
        traits, samples = rough.traits[0], float(rough.samples[0])
        self.measured.append(_Measured(traits, samples, times, held / beside, most, planned))

    def look(self, candidate: Candidate) -> None:
        """Plan the small steps of a candidate, where nothing is known of it."""
        for flat in self._needed(candidate):
            if flat not in self.looks:
                strategy = self._strategy(flat)
                answer = self._small.of(strategy)
                self.looks[flat] = Probe(answer, self._small.seconds_of_plan(strategy))
                self.learn(flat, answer, planned=False)

    def probed(self, candidate: Candidate) -> bool:
        """True if nothing has to be planned for a candidate's estimates."""
        return candidate in self.learned.candidates or all(
            one in self.looks for one in self._needed(candidate)
        )

    def ahead(self, candidate: Candidate) -> bool:
        """Have a candidate's small steps planned by other processes that have time; false where none has."""
        missing = () if candidate in self.learned.candidates else self._needed(candidate)
        return all(
            self._small.ahead(self._strategy(one)) for one in missing if one not in self.looks
        )

    def _needed(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """The candidates that are looked at for one: of blocks that run again, or wait, also the one with none of
        them.
        """
        flat = replace(candidate, stages=1, schedule="", turns=1)
        if _again(candidate) and self.lower_bounds.limit is not None:
            return _with_blocks(flat, 0), _with_blocks(flat, self.blocks)
        return (_with_blocks(flat, self.blocks),) if _again(candidate) else (flat,)

    def about(self, candidate: Candidate) -> tuple[Seconds, Bytes]:
        """Seconds of a step, with room or without, and bytes on a rank."""
        if 0 < _again(candidate) < self.blocks:
            every, none = (_with_blocks(candidate, count) for count in (self.blocks, 0))
            part = _again(candidate) / self.blocks
            pairs = zip(self.about(none), self.about(every), strict=True)
            seconds, memory = (one + part * (two - one) for one, two in pairs)
        else:
            found = _Corrected(CandidateTable.of([candidate]), self.lower_bounds).now(self.measured)
            seconds, memory = (float(each[0]) for each in found)
        return Seconds(seconds), Bytes(int(memory))

    def has_room(self, candidate: Candidate) -> bool:
        """True for a candidate that should fit, as far as is known."""
        memory = np.array([float(self.about(candidate)[1])])
        own = _Corrected(CandidateTable.of([candidate]), self.lower_bounds)
        own.now(self.measured)
        return bool(self.over(memory, own.margin)[0] <= 1)

    def measures(self, candidate: Candidate) -> Measures | None:
        """The measures of a candidate that was looked at, about; None of others, and where it cannot be planned."""
        before = self.learned.candidates.get(candidate)
        if isinstance(before, Measures):
            return before
        every = [self.looks[one].answer for one in self._needed(candidate) if one in self.looks]
        found = [each for each in every if isinstance(each, Measures)]
        if len(found) < len(self._needed(candidate)):
            return None
        part = _again(candidate) / self.blocks if _again(candidate) else 1.0
        flat = along(found[0], found[-1], part)
        if candidate.stages == 1:
            return flat
        seconds, memory = self.about(candidate)
        exposed = flat.exposed / candidate.stages
        idle = max(seconds - exposed - flat.computing / candidate.stages, 0.0)
        return Measures(seconds, memory, Seconds(exposed), Seconds(idle))

    def just_enough(self, candidate: Candidate) -> Candidate:
        """The candidate with as few blocks that run again, or wait, as have room; itself where all must, or none
        must.
        """
        if self.lower_bounds.limit is None or _again(candidate) != self.blocks or not self.blocks:
            return candidate
        own = _Corrected(CandidateTable.of([candidate]), self.lower_bounds)
        own.now(self.measured)
        none, every = (self.about(_with_blocks(candidate, count))[1] for count in (0, self.blocks))
        # With room to spare, where all blocks leave some.
        sure, room = (float(self.room(own.margin * each)[0]) for each in (own.spare, 1.0))
        room = sure if every <= sure else room
        if not every <= room < none:
            return candidate
        parts = candidate.stages * candidate.turns
        fewest = ceil((none - room) / (none - every) * self.blocks / parts) * parts
        return _with_blocks(candidate, min(fewest, self.blocks))

    def seconds_of_plan(self, candidate: Candidate) -> float:
        """Seconds in which a candidate would be planned and simulated, about; 0 if no look says it."""
        flat = self._needed(candidate)[-1]
        times = COMPUTED if candidate.stages > 1 and not candidate.schedule else 1.0
        look = self.looks.get(flat)
        known = look is not None and not isinstance(look.answer, Unplannable)
        return times * (
            look.seconds if look is not None and known else self._seconds_alike(candidate)
        )

    def seconds_of_probe(self, candidate: Candidate) -> float:
        """Seconds in which a candidate would be looked at, about; 0 if it was, or where nothing says it."""
        if self.probed(candidate) or not self.blocks:
            return 0.0
        return (FEW + MORE) / self.blocks * self._seconds_alike(candidate)

    def _seconds_alike(self, candidate: Candidate) -> float:
        """Seconds in which a candidate without stages would be planned, by the look at the one most alike; 0 without.

        By one with as many micro-batches or fewer, layers cut or not: half of the time depends on their number.
        """
        looks = [
            ((flat.tensor > 1) == (candidate.tensor > 1), flat.micro_batches, look.seconds)
            for flat, look in self.looks.items()
            if flat.micro_batches <= candidate.micro_batches
            and not isinstance(look.answer, Unplannable)
        ]
        _, many, seconds = max(looks, default=(False, 1, 0.0))
        return seconds * (1 + candidate.micro_batches / many) / 2


def _again(candidate: Candidate) -> int:
    return candidate.recompute + candidate.offload


def _with_blocks(candidate: Candidate, count: int) -> Candidate:
    """The candidate with so many blocks that run again, or wait, whichever do."""
    if candidate.offload:
        return replace(candidate, offload=count)
    return replace(candidate, recompute=count) if candidate.recompute else candidate
