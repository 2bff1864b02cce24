"""The least that a strategy can take, in seconds and bytes, before it is planned.

Lower bounds cover the work that every plan of a candidate does: the calls of the step, in pieces, and its update
(`shared_work`); gradients and parts of sums that are added up (`Exchanges`). Queues run side by side, so the longest
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, lcm
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.hardware.costs import Costs, DefaultDevice
from weft.hardware.planning_costs import TopologyCosts
from weft.ir.plan_nodes import CollectiveKind
from weft.patterns import first_match
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable, Floats, Ints, Mask
from weft.search.shared_work import SharedWork, once
from weft.search.steps.exchanged import WeightGradient
from weft.search.steps.facts import StepFacts
from weft.units import Bytes

# Bytes of a gradient's element on its way, at least.
_NARROW = 2


@final
@dataclass(frozen=True, eq=False)
class Exchanges:
    """The exchanges of one step on one machine."""

    facts: StepFacts
    _seconds: dict[object, float] = field(default_factory=dict, repr=False)
    _bytes: dict[object, float] = field(default_factory=dict, repr=False)
    _grouped: dict[object, list[tuple[int, ...]]] = field(default_factory=dict, repr=False)

    def reduction(self, table: CandidateTable, least: bool = False) -> Floats:
        """Seconds to reduce the gradients of weights along the data axis; "free" layouts need no sum.

        With `least` each rank may gather what is around a layer, and make the whole gradient.
        """
        if least and self.facts.guided:
            return np.zeros(len(table))
        several = (table.data > 1) & ~table.laid("free")
        found, some = np.zeros(len(table)), table.where(several)
        whole, sharded = some.laid("data"), some.zero > 0
        form = 2 * ((2 * some.grids + whole) * 2 + sharded) + some.outer
        found[several] = _for_each(form, lambda n: self._reduced(some.candidate(n), least))
        return found

    def _reduced(self, candidate: Candidate, least: bool) -> float:
        collective: CollectiveKind = "reduce_scatter" if candidate.zero else "all_reduce"
        key = candidate.layouts == "data", collective, least
        size = once(self._bytes, key, lambda: self._gradients(*key))
        size /= candidate.tensor * candidate.stages
        whole = Bytes(int(size))
        return self._collective(collective, whole, candidate, along_data=True, least=least)

    def _gradients(self, whole: bool, collective: CollectiveKind, least: bool) -> float:
        """Bytes of gradients that are added up by a collective: of all weights, or of those that are cut."""
        facts, passes = self.facts, 2 if collective == "all_reduce" else 1

        def size(each: WeightGradient) -> float:
            if not least:
                return each.elements * each.item * facts.narrowed
            around = each.around * facts.narrowed / passes
            return min(each.elements * min(_NARROW, each.item), around)

        cuts = facts.linears.cuts
        return sum(
            size(each)
            for each in facts.gradients
            if not (least and each.key in facts.laid)
            and (whole or each.key.removesuffix(".weight") in cuts)
        )

    def sums(self, table: CandidateTable, least: bool = False) -> Floats:
        """Seconds to reduce the partial results of layers split by columns and rows along the tensor axis.

        With `least` weights may be gathered in place.
        """
        cut = table.laid("columns") | table.laid("sequence")
        found = np.zeros(len(table))
        some = table.where(cut)
        if len(some) and not (least and self._are_cut_otherwise):
            micro = some.micro_batches
            form = (some.grids * (micro.max() + 1) + micro) * 2 + some.outer
            found[cut] = _for_each(form, lambda n: self._added_up(some.candidate(n), least))
        return found

    @cached_property
    def _are_cut_otherwise(self) -> bool:
        """True if the user says how some of the layers are laid out that candidates cut, or what is around them."""
        weights = (f"{module}.weight" for module in self.facts.linears.cuts)
        base = self.facts.base.parameters
        return self.facts.guided or any(first_match(base, each) is not None for each in weights)

    def _added_up(self, candidate: Candidate, least: bool) -> float:
        total = 0.0
        for each, count in self.facts.sums.items():
            parts = candidate.data * candidate.micro_batches
            size = Bytes(int(each.size * self.facts.narrowed / parts))
            collective: CollectiveKind = "reduce_scatter" if least and each.once else "all_reduce"
            one = self._collective(collective, size, candidate, along_data=False, least=least)
            added = candidate.micro_batches * one
            if least:
                weights = Bytes(int(each.weights * self.facts.narrowed))
                gathered = self._collective(
                    "all_gather", weights, candidate, along_data=False, least=True
                )
                added = min(added, gathered)
            total += count * added
        return total / candidate.stages

    def _collective(
        self,
        collective: CollectiveKind,
        size: Bytes,
        candidate: Candidate,
        *,
        along_data: bool,
        least: bool,
    ) -> float:
        """Seconds of a collective that each stage has as much of, on the slowest of them; of `least` on the fastest.

        One of the stages has as much as this or more; with unlike links it may be the one whose links are fastest.
        """
        parts = candidate.data if along_data else candidate.tensor
        if parts == 1:
            return 0.0
        moved = size * (parts - 1) // parts * (2 if collective == "all_reduce" else 1)
        # Neighbours of a group are as far apart as the other axis is long, where that is inside.
        other = candidate.tensor if along_data else candidate.data
        apart = other if along_data != candidate.outer else 1
        where = parts, apart, candidate.ranks

        def seconds() -> float:
            # Neighbours of a communicator are so many ranks apart.
            whole, every = parts * apart, self.facts.ranks
            groups = once(
                self._grouped,
                where,
                lambda: [
                    every[begin + place : begin + whole : apart]
                    for begin in range(0, candidate.ranks, whole)
                    for place in range(apart)
                ],
            )
            one = other if least else len(groups)
            # Stages that begin at the same place of a node are alike.
            unlike = one * lcm(parts * other, self._node) // (parts * other)
            costs = self.facts.machine.costs
            return min(
                costs.of_collective(
                    collective, size, Bytes(moved), groups[first : first + one]
                ).seconds
                for first in range(0, min(len(groups), unlike), one)
            )

        return once(self._seconds, (collective, size, where, least and candidate.stages), seconds)

    @cached_property
    def _node(self) -> int:
        """Ranks after which devices and links come again: those of a node, where all nodes are alike; else all."""
        costs = self.facts.machine.costs
        if isinstance(costs, DefaultDevice):
            return 1
        topology = costs.topology if isinstance(costs, TopologyCosts) else None
        if topology is None or len(topology.groups) > 1 or len(topology.levels) > 1:
            return len(self.facts.ranks)
        return len(topology.groups[0].kind)


def _for_each(form: Ints, seconds: Callable[[int], float]) -> Floats:
    _, first, inverse = np.unique(form, return_index=True, return_inverse=True)
    return np.array([seconds(int(number)) for number in first])[inverse]


@final
@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of candidates for one step on one machine.

    Attributes:
        facts: of the step.
        limit: bytes of memory of a device, with what it reserves; None if that is not known.
    """

    facts: StepFacts
    limit: int | None

    @property
    def _costs(self) -> Costs:
        return self.facts.machine.costs

    @cached_property
    def work(self) -> SharedWork:
        """The work of the step."""
        return SharedWork(self.facts)

    @cached_property
    def exchanges(self) -> Exchanges:
        """The exchanges of candidates."""
        return Exchanges(self.facts)

    @cached_property
    def exact(self) -> bool:
        """True if pieces of calls are known to be no faster than their part of the whole."""
        return isinstance(self._costs, TopologyCosts | DefaultDevice)

    def least(self, table: CandidateTable) -> Floats:
        """Seconds that steps of candidates take at least."""
        if not self.exact:
            # The operations of the step over those that all devices can do in a second, in any dtype.
            capacities = map(self._costs.capacity, self.facts.ranks)
            peaks = sorted(max(each.peaks.values(), default=0.0) for each in capacities)
            used = np.cumsum(peaks[::-1])
            return self.facts.flops / used[table.ranks - 1] if peaks[0] else np.zeros(len(table))
        work, exchanges = self.work, self.exchanges
        lower_bounds = (
            work.chain(table),
            work.busy(table, least=True),
            exchanges.reduction(table, least=True),
            exchanges.sums(table, least=True),
        )
        found: Floats = np.max(lower_bounds, axis=0)
        return found

    def states(self, table: CandidateTable) -> Floats:
        """Bytes of parameters and optimizer states of each candidate on a rank, with what its device reserves.

        Where devices have unlike limits, as they compare with the least of these: `Measures.memory`.
        """
        found: Floats = np.maximum(self.variables(table) + self._beside[table.ranks - 1], 0.0)
        return found

    def variables(self, table: CandidateTable) -> Floats:
        """Bytes of variables of each candidate on a rank, the mean of all: parameters, buffers and optimizer states."""
        cut = np.where(table.laid("data"), 1, table.tensor)
        shards = np.where((table.zero > 0) | table.laid("free"), table.data, 1)
        whole = self.facts.states + self.facts.parameters
        split = table.experts & (shards == 1)
        left = whole - np.where(split, self.facts.expert_bytes * (1 - 1 / table.data), 0.0)
        # What the user splits may be so along all axes.
        laid = self.facts.laid_bytes
        every = table.data * table.tensor
        found: Floats = ((left - laid) / (cut * shards) + laid / every) / table.stages
        return found

    @cached_property
    def _beside(self) -> Floats:
        """For each number of ranks, what their devices reserve, less their limits above the least of all; the mean."""
        machine, least = self.facts.machine, self.facts.machine.least_limit or 0
        costs, ranks = self._costs, self.facts.ranks
        every = [costs.capacity(rank).reserve - (machine.limit_of(rank) - least) for rank in ranks]
        found: Floats = np.cumsum(every) / np.arange(1, len(ranks) + 1)
        return found

    @cached_property
    def reserve(self) -> int:
        """Bytes that a device reserves, the mean of all, as they compare with the least limit."""
        return int(self._beside[-1])

    @cached_property
    def is_tight(self) -> bool:
        """True if data parallel on all ranks may lack room, by what one device keeps for the backward."""
        if self.limit is None:
            return False
        ranks = len(self.facts.ranks)
        states = float(self.states(CandidateTable.of([Candidate(ranks)]))[0])
        return states + self.facts.kept / ranks > self.limit

    def memory(self, table: CandidateTable) -> Floats:
        """Bytes that a rank takes at least, for each candidate."""
        return np.floor(self.states(table))

    def may_fit(self, table: CandidateTable) -> Mask:
        """True for candidates that take no more memory at least than the limit."""
        found: Mask = self.memory(table) <= (inf if self.limit is None else self.limit)
        return found
