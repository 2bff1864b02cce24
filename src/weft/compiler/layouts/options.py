"""Options: the signatures that a variable of the deduction may take along one axis, with their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias, final

import numpy as np

from weft.cached import cached_property
from weft.compiler.decompositions.table import legal_signatures, reduction_cost
from weft.compiler.hints import Thin, enough_elements
from weft.compiler.layouts.boxing_costs import BoxingCosts, Table, idle_bytes, sbp_numbers
from weft.compiler.layouts.problem import Given, OpChoice, Share, Variable
from weft.compiler.signatures import halo_cost
from weft.errors import LayoutError
from weft.hardware import CostModel
from weft.layout import SBP, Broadcast, Partial, Split
from weft.ops import OpCall, Signature, flops, item, localize, traffic
from weft.units import Bytes, Flops

# One signature for each axis of the grid.
PerAxis: TypeAlias = tuple[Signature, ...]


@final
@dataclass(frozen=True, eq=False)
class SignatureOptions:
    """The signatures to choose from, and what each costs by itself; compared by identity."""

    signatures: tuple[Signature, ...]
    costs: Table
    _sbps: dict[tuple[str, int], frozenset[SBP]] = field(default_factory=dict)

    def made(self, result: int) -> frozenset[SBP]:
        """The SBPs that a result may be made in."""
        key = "made", result
        if key not in self._sbps:
            self._sbps[key] = frozenset(one.results[result] for one in self.signatures)
        return self._sbps[key]

    def wanted(self, operand: int) -> frozenset[SBP]:
        """The SBPs that an operand may be wanted in, without Partials."""
        key = "wanted", operand
        if key not in self._sbps:
            found = frozenset(one.operands[operand] for one in self.signatures)
            self._sbps[key] = frozenset(sbp for sbp in found if not isinstance(sbp, Partial))
        return self._sbps[key]


def candidates(call: OpCall, parts: int, empty: bool) -> Sequence[Signature]:
    """The legal signatures along an axis; one of them along an axis of one rank, where all mean the same."""
    every = legal_signatures(call, parts, empty)
    return every if parts > 1 else every[:1]


def work_cost(local: OpCall, grid: tuple[int, ...], cost_model: CostModel) -> float:
    """The cost of a local call on all ranks of a grid."""
    devices = prod(grid)
    touched = Bytes(devices * traffic(local))
    return cost_model.work(Flops(devices * flops(local)), touched, item(local))


@final
@dataclass(frozen=True)
class WorkOptions:
    """Options of op calls on a grid; equal calls share them."""

    grid: tuple[int, ...]
    cost_model: CostModel
    _known: dict[tuple[object, ...], SignatureOptions] = field(default_factory=dict)

    def of(self, work: OpChoice, axis: int, chosen: PerAxis) -> SignatureOptions:
        """The options of a call along `axis` while the other axes keep their `chosen` signatures.

        Only signatures under which those of the later axes stay legal, and that leave no rank
        without elements, except where that is allowed. The chosen one is always among them.

        Raises:
            RuleError: when the op has no rule.
        """
        key = (work.call, work.thin, axis, chosen[:axis] + chosen[axis + 1 :])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._options(work, axis, chosen)
        return self._pinned(work, axis, found) if work.pinned else found

    def _pinned(self, work: OpChoice, axis: int, options: SignatureOptions) -> SignatureOptions:
        pin = work.pinned[axis]
        if pin not in options.signatures:
            every = options.signatures or candidates(work.call, self.grid[axis], bool(work.thin))
            legal = "; ".join(map(str, every[:8]))
            raise LayoutError(
                f"signatures={{{work.node.makes[0].name!r}: …}} fixes {pin} along axis {axis} for {work.node.op}, "
                f"which does not admit it there; use one of {legal}"
            )
        key = "pinned", id(options), pin
        if key not in self._known:
            costs = options.costs[[options.signatures.index(pin)]]
            self._known[key] = SignatureOptions((pin,), costs)
        return self._known[key]

    def _options(self, work: OpChoice, axis: int, chosen: PerAxis) -> SignatureOptions:
        outer, empty = work.call, bool(work.thin)
        for before in range(axis):
            outer = localize(outer, chosen[before], self.grid[before], 0)
        found: dict[Signature, float] = {}
        for signature in candidates(outer, self.grid[axis], empty):
            every = chosen[:axis] + (signature,) + chosen[axis + 1 :]
            if all_have_elements(work.call, every, self.grid, work.thin):
                mine = localize(outer, signature, self.grid[axis], 0)
                local = self._inner(mine, axis, chosen, empty)
                if local is not None:
                    inside = reduction_cost(outer, signature, self.grid, axis, self.cost_model)
                    halo = halo_cost(outer, signature, self.grid, axis, self.cost_model)
                    found[signature] = work_cost(local, self.grid, self.cost_model) + inside + halo
        return SignatureOptions(tuple(found), np.array(list(found.values())))

    def _inner(self, call: OpCall, axis: int, chosen: PerAxis, empty: bool) -> OpCall | None:
        for after in range(axis + 1, len(self.grid)):
            if chosen[after] not in legal_signatures(call, self.grid[after], empty):
                return None
            call = localize(call, chosen[after], self.grid[after], 0)
        return call


@final
@dataclass(frozen=True)
class GivenOptions:
    """Options of inputs, hints, outputs and Shares."""

    grid: tuple[int, ...]
    cost_model: CostModel
    _known: dict[object, SignatureOptions] = field(default_factory=dict)

    def of(self, given: Given, axis: int, chosen: PerAxis) -> SignatureOptions:
        """The options of an input, a hint or an output along `axis` while the other axes keep theirs."""
        key = (given, axis, chosen[:axis] + chosen[axis + 1 :])
        if key not in self._known:
            fit = self._fitting(given, given.choices[axis], axis, chosen)
            split = self._split_charge(given, axis, chosen)
            weight = max(float(given.sent), self.cost_model.bytes_per_held * given.fed)
            copied = weight * self._idle(given, axis, chosen) if weight else 0.0
            costs = [split if isinstance(one.operands[0], Split) else copied for one in fit]
            self._known[key] = SignatureOptions(fit, np.array(costs))
        return self._known[key]

    def _split_charge(self, given: Given, axis: int, chosen: PerAxis) -> float:
        """The charge for splitting an input that the user left free."""
        if not given.prefer_broadcast or len(given.choices[axis]) == 1:
            return 0.0
        unused = self._idle(given, axis, chosen)
        # The collective decides ties.
        return self.cost_model.whole_parameter * unused + self.cost_model.bytes_per_collective

    def _idle(self, given: Given, axis: int, chosen: PerAxis) -> float:
        """Bytes of the copies of an input that a split along `axis` would save."""
        others = tuple(one.operands[0] for one in chosen)
        return idle_bytes(given.spec, axis, others[:axis] + others[axis + 1 :], self.grid)

    def shared(
        self, share: Share, seen: frozenset[SBP], axis: int, chosen: PerAxis
    ) -> SignatureOptions:
        """The options of a Share along `axis`: what its value may be made or wanted in, and what it has."""
        key = (share.spec, share.thin, seen, axis, chosen)
        if key not in self._known:
            numbers = sbp_numbers(len(share.spec.shape))
            sbps = sorted(seen | set(chosen[axis].results), key=lambda sbp: numbers[sbp])
            every = tuple(Signature((sbp,), (sbp,)) for sbp in sbps)
            fit = self._fitting(share, every, axis, chosen)
            self._known[key] = SignatureOptions(fit, np.zeros(len(fit)))
        return self._known[key]

    def _fitting(
        self, port: Given | Share, every: tuple[Signature, ...], axis: int, chosen: PerAxis
    ) -> tuple[Signature, ...]:
        """The signatures that leave no rank without elements where it must have some; all, where none does so."""
        fit = tuple(
            one
            for one in every
            if enough_elements(
                port.spec.shape,
                [other.operands[0] for other in (*chosen[:axis], one, *chosen[axis + 1 :])],
                self.grid,
                port.thin,
            )
        )
        return fit or every


def start(variable: Variable, axes: int) -> PerAxis:
    """The start of the search: everything Broadcast, which is always legal, or what the user fixed."""
    match variable:
        case OpChoice(pinned=pinned) if pinned:
            return pinned
        case OpChoice(call=call):
            operands, results = len(call.operands), len(call.results)
        case Given(choices=choices):
            operands, results = 1, len(choices[0][0].results)
        case Share():
            operands, results = 1, 1
    return (Signature((Broadcast(),) * operands, (Broadcast(),) * results),) * axes


def all_have_elements(
    call: OpCall, chosen: PerAxis, grid: tuple[int, ...], thin: Sequence[Thin] = ()
) -> bool:
    """True where no operand or result is split into more pieces than it has elements, except where `thin` says so."""
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
        exact: true where the cost is proven least, along each axis with the others as they are.
        broken: how often something that is forbidden could not be avoided, along the axis solved
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
    """The memory of deductions on grids of one shape: nothing in it depends on the problem.

    Options by op call and axis, tables by tensor and options, solutions by the form of a problem.
    Stages on equal grids share it, so that equal ones are solved once.
    """

    grid: tuple[int, ...]
    cost_model: CostModel
    tables: dict[tuple[object, ...], ReadCosts] = field(default_factory=dict)
    kept: dict[Signature, SignatureOptions] = field(default_factory=dict)
    repeated: dict[tuple[SignatureOptions, int], Table] = field(default_factory=dict)
    numbers: dict[object, int] = field(default_factory=dict)
    solved: dict[tuple[object, ...], LayoutChoice] = field(default_factory=dict)

    @cached_property
    def work(self) -> WorkOptions:
        """Options of calls."""
        return WorkOptions(self.grid, self.cost_model)

    @cached_property
    def given(self) -> GivenOptions:
        """Options of inputs."""
        return GivenOptions(self.grid, self.cost_model)

    @cached_property
    def boxing(self) -> BoxingCosts:
        """Costs of boxing, by tensor."""
        return BoxingCosts(self.grid, self.cost_model)

    def number(self, of: object) -> int:
        """A number for what is looked up again and again: a tensor, or signatures."""
        return self.numbers.setdefault(of, len(self.numbers))

    def times(self, options: SignatureOptions, times: int) -> Table:
        """The costs of options that run several times a step; one table for equal ones."""
        key = options, times
        if times > 1 and key not in self.repeated:
            self.repeated[key] = options.costs * times
        return self.repeated[key] if times > 1 else options.costs

    def as_it_is(self, signature: Signature) -> SignatureOptions:
        """The one option of a variable that keeps its signature."""
        found = self.kept.get(signature)
        if found is None:
            found = self.kept[signature] = SignatureOptions((signature,), np.zeros(1))
        return found


@final
@dataclass(frozen=True, eq=False)
class KnownGrids:
    """The memory of deductions with one cost model, by the shapes of grids."""

    cost_model: CostModel
    _grids: dict[tuple[int, ...], Known] = field(default_factory=dict)

    def of(self, grid: tuple[int, ...]) -> Known:
        """The memory of deductions on grids of this shape."""
        return self._grids.setdefault(grid, Known(grid, self.cost_model))
