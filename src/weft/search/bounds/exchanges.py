"""The exchanges of a point: seconds in which gradients, and sums around layers that are cut, are added up.

At least, where a plan may gather weights or activations in place of adding up; or as plans mostly do it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final

from weft.cached import cached_property
from weft.ir.plan_nodes import CollectiveKind
from weft.search.bounds.once import once
from weft.search.space import Point
from weft.search.steps.exchanged import Sum, WeightGradient
from weft.search.steps.facts import StepFacts
from weft.units import Bytes

# Bytes of a gradient's element on its way, at least.
_NARROW = 2


@final
@dataclass(frozen=True)
class Exchanges:
    """The exchanges of one step on one machine.

    Attributes:
        facts: of the step.
    """

    facts: StepFacts
    _seconds: dict[object, float] = field(default_factory=dict, repr=False)
    _grouped: dict[object, list[tuple[int, ...]]] = field(default_factory=dict, repr=False)

    def reduction(self, point: Point, least: bool = False) -> float:
        """Seconds in which gradients of weights are added up along the data axis.

        Args:
            point: of the space; "free" layouts need add up none.
            least: where each rank may gather what is around a layer, and make the whole gradient.
        """
        if point.data == 1 or point.layouts == "free":
            return 0.0
        kind: CollectiveKind = "reduce_scatter" if point.zero else "all_reduce"
        key = point.layouts == "data", kind, least
        size = once(self._seconds, ("bytes", *key), lambda: self._gradients(*key))
        size /= point.tensor * point.stages
        return self._collective(kind, Bytes(int(size)), point, along_data=True)

    def _gradients(self, whole: bool, kind: CollectiveKind, least: bool) -> float:
        """Bytes of gradients that are added up by a collective of a kind: of all weights, or of those that are cut."""
        facts, passes = self.facts, 2 if kind == "all_reduce" else 1

        def size(each: WeightGradient) -> float:
            if not least:
                return each.elements * each.item * facts.narrowed
            around = each.around * facts.narrowed / passes
            return min(each.elements * min(_NARROW, each.item), around)

        kinds = facts.linears.kinds
        return sum(
            size(each)
            for each in facts.gradients
            if whole or each.key.removesuffix(".weight") in kinds
        )

    def sums(self, point: Point, least: bool = False) -> float:
        """Seconds in which what is in parts along the tensor axis is added up.

        Args:
            point: of the space; only layers cut by columns and rows leave parts.
            least: where weights may be gathered in place.
        """
        if point.layouts not in ("columns", "sequence"):
            return 0.0
        grid = point.data, point.tensor, point.stages, point.outer
        key = "sums", grid, point.micro_batches, least
        return once(self._seconds, key, lambda: self._all_sums(point, least))

    def _all_sums(self, point: Point, least: bool) -> float:
        total = 0.0
        for each, count in self._sums.items():
            size = Bytes(int(each.size * self.facts.narrowed / (point.data * point.micro_batches)))
            added = point.micro_batches * self._collective(
                "all_reduce", size, point, along_data=False
            )
            if least:
                weights = Bytes(int(each.weights * self.facts.narrowed))
                gathered = self._collective("all_gather", weights, point, along_data=False)
                added = min(added, gathered)
            total += count * added
        return total / point.stages

    @cached_property
    def _sums(self) -> Counter[Sum]:
        return Counter(self.facts.sums)

    def _collective(
        self, kind: CollectiveKind, size: Bytes, point: Point, along_data: bool
    ) -> float:
        parts = point.data if along_data else point.tensor
        if parts == 1:
            return 0.0
        moved = size * (parts - 1) // parts * (2 if kind == "all_reduce" else 1)
        where = point.data, point.tensor, point.stages, point.outer, along_data

        def seconds() -> float:
            groups = once(self._grouped, where, lambda: self._groups(point, along_data))
            costs = self.facts.machine.costs
            return costs.of_collective(kind, size, Bytes(moved), groups).seconds

        return once(self._seconds, (kind, size, where), seconds)

    def _groups(self, point: Point, along_data: bool) -> list[tuple[int, ...]]:
        """The ranks of each communicator along an axis."""
        inner = point.data if point.outer else point.tensor
        whole = point.data * point.tensor
        strided = along_data != point.outer
        found = []
        for first in range(0, point.ranks, whole):
            own = self.facts.ranks[first : first + whole]
            if strided:
                found += [own[place::inner] for place in range(inner)]
            else:
                found += [own[place : place + inner] for place in range(0, whole, inner)]
        return found
