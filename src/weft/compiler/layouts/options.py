"""Options: the signatures that a variable of the deduction may take along the axes that are free, with their costs.

An axis that is not free keeps the signature that it has. Coordinate descent frees one axis at a time; a bound for all
layouts frees all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TypeAlias, final

import numpy as np

from weft.cached import cached_property
from weft.compiler.decompositions.table import legal_signatures, reduction_cost
from weft.compiler.hints import Thin, enough_elements
from weft.compiler.layouts.boxing_costs import (
    BoxingCosts,
    SBPs,
    Table,
    reductions,
    replication_bytes,
    sbp_numbers,
)
from weft.compiler.layouts.intent import charges, forbidden
from weft.compiler.layouts.problem import FreeVariable, OpChoice, ReadEdge, SharedBoxing, Variable
from weft.compiler.signatures import halo_cost
from weft.errors import LayoutError
from weft.hardware import CostModel
from weft.layout import Broadcast, Partial, Split
from weft.ops import OpCall, Signature, TensorSpec, flops, item, localize, traffic
from weft.units import Bytes, Flops

# One signature for each axis of the grid.
PerAxis: TypeAlias = tuple[Signature, ...]
# Numbers of axes of the grid.
Axes: TypeAlias = tuple[int, ...]


@final
@dataclass(frozen=True, eq=False)
class SignatureOptions:
    """The signatures to choose from, and what each costs by itself; compared by identity."""

    signatures: tuple[PerAxis, ...]
    costs: Table
    _sbps: dict[tuple[object, ...], frozenset[SBPs]] = field(default_factory=dict)

    def made(self, result: int) -> tuple[SBPs, ...]:
        """The layout of a result in each option."""
        return tuple([tuple([one.results[result] for one in each]) for each in self.signatures])

    def wanted(self, operand: int) -> tuple[SBPs, ...]:
        """The layout of an operand in each option."""
        return tuple([tuple([one.operands[operand] for one in each]) for each in self.signatures])

    def made_along(self, axes: Axes, result: int) -> frozenset[SBPs]:
        """The SBPs along some axes that a result may be made in."""
        key = "made", axes, result
        if key not in self._sbps:
            self._sbps[key] = frozenset(_along(axes, each) for each in self.made(result))
        return self._sbps[key]

    def wanted_along(self, axes: Axes, operand: int) -> frozenset[SBPs]:
        """The SBPs along some axes that an operand may be wanted in, without Partials."""
        key = "wanted", axes, operand
        if key not in self._sbps:
            found = (_along(axes, each) for each in self.wanted(operand))
            self._sbps[key] = frozenset(
                sbps for sbps in found if not any(isinstance(sbp, Partial) for sbp in sbps)
            )
        return self._sbps[key]


def _along(axes: Axes, sbps: SBPs) -> SBPs:
    return tuple([sbps[axis] for axis in axes])


def candidates(call: OpCall, parts: int, empty: bool) -> Sequence[Signature]:
    """The legal signatures along an axis; one of them along an axis of one rank, where all mean the same."""
    every = legal_signatures(call, parts, empty)
    return every if parts > 1 else every[:1]


def work_cost(local: OpCall, grid: tuple[int, ...], cost_model: CostModel) -> float:
    """The cost of a local call on all ranks of a grid."""
    devices = prod(grid)
    touched = Bytes(devices * traffic(local))
    return cost_model.work(Flops(devices * flops(local)), touched, item(local))


def start(variable: Variable, axes: int) -> PerAxis:
    """The start of the search: everything Broadcast, which is always legal, or what the user fixed."""
    match variable:
        case OpChoice(pinned=pinned) if pinned:
            return pinned
        case OpChoice(call=call):
            operands, results = len(call.operands), len(call.results)
        case FreeVariable(choices=choices):
            operands, results = 1, len(choices[0][0].results)
        case SharedBoxing():
            operands, results = 1, 1
    return (Signature((Broadcast(),) * operands, (Broadcast(),) * results),) * axes


def all_have_elements(
    call: OpCall, chosen: PerAxis, grid: tuple[int, ...], thin: Sequence[Thin] = ()
) -> bool:
    """True if no operand or result is split into more pieces than it has elements, except where `thin` says so."""
    specs = (*call.operands, *call.results)
    by_axis = ((*signature.operands, *signature.results) for signature in chosen)
    sbps = tuple(zip(*by_axis, strict=True)) if chosen else ((),) * len(specs)
    allowed = thin or (frozenset(),) * len(specs)
    return all(
        spec is None or enough_elements(spec.shape, every, grid, free)
        for spec, every, free in zip(specs, sbps, allowed, strict=True)
    )


@final
@dataclass(frozen=True)
class LayoutChoice:
    """The choice of a deduction: for each variable, its signature on each axis.

    Attributes:
        cost: of all work and boxing, in bytes, with the charges along the axis solved last.
        bound: the least that any choices along the axis solved last could cost, with the others as
            they are.
        exact: true if the cost is proven least, along each axis with the others fixed.
        broken: how often a forbidden choice could not be avoided, along the axis solved
            last; neither `cost` nor `bound` count it.
    """

    signatures: tuple[PerAxis, ...]
    cost: float = 0.0
    bound: float = 0.0
    exact: bool = True
    broken: int = 0


@final
@dataclass(frozen=True, eq=False)
class ReadCosts:
    """The costs of boxing on an edge, and 1 where an intent forbids it; compared by identity."""

    boxing: Table
    forbidden: Table | None = None

    @cached_property
    def highest(self) -> float:
        """The most that boxing costs."""
        return float(self.boxing.max())


@final
@dataclass
class Known:
    """A cache of deductions on grids of one shape, independent of the problem.

    Options by op call and free axes, tables by tensor and options, solutions by the form of a problem.
    Stages on equal grids share it, so that equal ones are solved once.
    """

    grid: tuple[int, ...]
    cost_model: CostModel
    options: dict[object, SignatureOptions] = field(default_factory=dict)
    tables: dict[object, ReadCosts] = field(default_factory=dict)
    numbers: dict[object, int] = field(default_factory=dict)
    solved: dict[tuple[object, ...], LayoutChoice] = field(default_factory=dict)

    @cached_property
    def boxing(self) -> BoxingCosts:
        """Costs of boxing, by tensor."""
        return BoxingCosts(self.grid, self.cost_model)

    def number(self, of: object) -> int:
        """A number for what is looked up again and again, such as the form of a problem."""
        return self.numbers.setdefault(of, len(self.numbers))

    def as_it_is(self, signatures: PerAxis) -> SignatureOptions:
        """The one option of a variable that keeps its signatures."""
        if signatures not in self.options:
            self.options[signatures] = SignatureOptions((signatures,), np.zeros(1))
        return self.options[signatures]

    def of(
        self, variable: OpChoice | FreeVariable, axes: Axes, chosen: PerAxis
    ) -> SignatureOptions:
        """The options of a variable along free axes while the others keep their `chosen` signatures.

        A call may take only signatures under which those of later axes stay legal, and that leave no rank without
        elements, except where that is allowed.

        Raises:
            RuleError: when an op has no rule.
            LayoutError: when a call does not admit a signature that the user fixed.
        """
        others = tuple([one for axis, one in enumerate(chosen) if axis not in axes])
        if isinstance(variable, OpChoice):
            own: object = (variable.call, variable.thin, variable.times, variable.pinned)
        else:
            own = variable
        key = own, axes, others
        found = self.options.get(key)
        if found is None:
            find = self._of_call if isinstance(variable, OpChoice) else self._of_given
            found = self.options[key] = find(variable, axes, chosen)  # type: ignore[arg-type]
        return found

    def shared(
        self, share: SharedBoxing, seen: frozenset[SBPs], axes: Axes, chosen: PerAxis
    ) -> SignatureOptions:
        """The options of a Share: what its value may be made or wanted in along free axes, and what it has."""
        key = share.spec, share.thin, seen, axes, chosen
        if key not in self.options:
            numbers = sbp_numbers(len(share.spec.shape))
            has = _along(axes, tuple([one.results[0] for one in chosen]))
            every = []
            for sbps in sorted(seen | {has}, key=lambda sbps: [numbers[sbp] for sbp in sbps]):
                free = dict(zip(axes, sbps, strict=True))
                every.append(
                    tuple(
                        Signature((free[axis],), (free[axis],)) if axis in free else one
                        for axis, one in enumerate(chosen)
                    )
                )
            fit = self._fitting(share, every)
            self.options[key] = SignatureOptions(fit, np.zeros(len(fit)))
        return self.options[key]

    def _of_call(self, work: OpChoice, axes: Axes, chosen: PerAxis) -> SignatureOptions:
        ways = dict(self._ways(work, axes, chosen))
        if work.pinned and not ways:
            axis = axes[0]
            unpinned = work._replace(pinned=())
            admitted = dict.fromkeys(each[axis] for each, _ in self._ways(unpinned, axes, chosen))
            legal = tuple(admitted) or candidates(work.call, self.grid[axis], bool(work.thin))
            raise LayoutError(
                f"signatures={{{work.node.makes[0].name!r}: …}} fixes {work.pinned[axis]} along axis {axis} for "
                f"{work.node.op}, which does not allow it there; use one of {'; '.join(map(str, legal[:8]))}"
            )
        return SignatureOptions(tuple(ways), np.array(list(ways.values())) * work.times)

    def _ways(self, work: OpChoice, axes: Axes, chosen: PerAxis) -> Iterator[tuple[PerAxis, float]]:
        """Each way to cut a call, with its cost: work, and what runs inside of it."""
        ways: list[tuple[PerAxis, OpCall, float]] = [((), work.call, 0.0)]
        for axis, parts in enumerate(self.grid):
            ways = [
                (
                    (*every, one),
                    localize(call, one, parts, 0),
                    cost
                    + sum(
                        inside(call, one, self.grid, axis, self.cost_model)
                        for inside in (reduction_cost, halo_cost)
                    ),
                )
                for every, call, cost in ways
                for one in self._signatures(work, call, axis, axes, chosen)
                if axis not in axes
                or all_have_elements(
                    work.call, (*every, one, *chosen[axis + 1 :]), self.grid, work.thin
                )
            ]
        for every, local, cost in ways:
            yield every, cost + work_cost(local, self.grid, self.cost_model)

    def _signatures(
        self, work: OpChoice, call: OpCall, axis: int, axes: Axes, chosen: PerAxis
    ) -> Sequence[Signature]:
        """The signatures along an axis of a call that is localized along those before it."""
        parts, empty = self.grid[axis], bool(work.thin)
        if axis in axes:
            legal = candidates(call, parts, empty)
            return [one for one in legal if not work.pinned or one == work.pinned[axis]]
        stays = axis < axes[0] or chosen[axis] in legal_signatures(call, parts, empty)
        return chosen[axis : axis + 1] if stays else ()

    def _of_given(self, given: FreeVariable, axes: Axes, chosen: PerAxis) -> SignatureOptions:
        free = (given.choices[axis] if axis in axes else (one,) for axis, one in enumerate(chosen))
        fit = self._fitting(given, tuple(product(*free)))
        costs = [sum(self._charge(given, axis, every) for axis in axes) for every in fit]
        return SignatureOptions(fit, np.array(costs, np.float64))

    def _charge(self, given: FreeVariable, axis: int, every: PerAxis) -> float:
        """The charge for splitting an input that the user left free, or for its copies."""
        model = self.cost_model
        sbps = tuple([one.operands[0] for one in every])
        if not isinstance(sbps[axis], Split):
            weight = max(float(given.sent), model.bytes_per_held * given.fed)
            return weight * self._idle(given.spec, axis, sbps) if weight else 0.0
        if not given.prefer_broadcast or len(given.choices[axis]) == 1:
            return 0.0
        # The collective decides ties.
        unused = self._idle(given.spec, axis, sbps)
        return model.whole_parameter * unused + model.bytes_per_collective

    def _idle(self, spec: TensorSpec, axis: int, sbps: SBPs) -> float:
        """Bytes of the copies of a tensor that a split along `axis` would save."""
        return replication_bytes(spec, axis, sbps[:axis] + sbps[axis + 1 :], self.grid)

    def _fitting(
        self, port: FreeVariable | SharedBoxing, every: Sequence[PerAxis]
    ) -> tuple[PerAxis, ...]:
        """The signatures that leave no rank without elements where it must have some; all, where none does so."""
        shape, grid, thin = port.spec.shape, self.grid, port.thin
        fit = tuple(
            each
            for each in every
            if enough_elements(shape, [one.operands[0] for one in each], grid, thin)
        )
        return fit or tuple(every)

    def read(
        self,
        edge: ReadEdge,
        early: bool,
        axes: Axes,
        ends: tuple[SignatureOptions, SignatureOptions],
    ) -> ReadCosts:
        """Costs of an edge for each option of its source and each of its target, with charges along free axes.

        `early` is true if a call reads the tensor.
        """
        source, target = ends
        ports = id(source), edge.result, id(target), edge.operand
        key = (edge.spec, axes, *ports, edge.intents, early, edge.times)
        if key in self.tables:
            return self.tables[key]
        made, wanted = source.made(edge.result), target.wanted(edge.operand)
        table, model = self.boxing.table(edge.spec, made, wanted), self.cost_model
        bans = []
        for axis in axes:
            sides = tuple(each[axis] for each in made), tuple(each[axis] for each in wanted)
            if early:
                table = table + model.early_reduction * reductions(*sides)
            if edge.intents and (intent := edge.intents[axis]):
                charge = charges(intent, *sides, model)
                if charge.any():
                    idle = np.array([self._idle(edge.spec, axis, sbps) for sbps in made])
                    table = table + idle[:, None] * charge
                bans.append(forbidden(intent, *sides, model))
        said = [ban for ban in bans if ban is not None]
        self.tables[key] = ReadCosts(table * edge.times, np.max(said, axis=0) if said else None)
        return self.tables[key]


@final
@dataclass(frozen=True, eq=False)
class KnownGrids:
    """The memory of deductions with one cost model, by the shapes of grids."""

    cost_model: CostModel
    _grids: dict[tuple[int, ...], Known] = field(default_factory=dict)

    def of(self, grid: tuple[int, ...]) -> Known:
        """The memory of deductions on grids of this shape."""
        return self._grids.setdefault(grid, Known(grid, self.cost_model))
