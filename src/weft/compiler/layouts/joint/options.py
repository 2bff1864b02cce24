"""Options over all axes at once: what a variable may take along each of them, with what that costs by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias, final

import numpy as np

from weft.compiler.decompositions.table import reduction_cost
from weft.compiler.hints import Thin, enough_elements
from weft.compiler.layouts.boxing_costs import Table
from weft.compiler.layouts.options import PerAxis, all_have_elements, candidates, work_cost
from weft.compiler.layouts.problem import Given, OpChoice, Problem, Share
from weft.compiler.signatures import halo_cost
from weft.hardware import CostModel
from weft.layout import SBP, Partial
from weft.ops import OpCall, Signature, TensorSpec, localize

# One SBP for each axis.
SBPs: TypeAlias = tuple[SBP, ...]


@final
@dataclass(frozen=True, eq=False)
class JointOptions:
    """The options of a variable and their costs; compared by identity."""

    signatures: tuple[PerAxis, ...]
    costs: Table

    def made(self, result: int) -> tuple[SBPs, ...]:
        """The layout of a result in each option."""
        return tuple(tuple(one.results[result] for one in every) for every in self.signatures)

    def wanted(self, operand: int) -> tuple[SBPs, ...]:
        """The layout of an operand in each option."""
        return tuple(tuple(one.operands[operand] for one in every) for every in self.signatures)


@final
@dataclass(frozen=True)
class JointSignatures:
    """Options on a grid; equal variables share them."""

    grid: tuple[int, ...]
    cost_model: CostModel
    _known: dict[object, JointOptions] = field(default_factory=dict, repr=False)

    def of(self, problem: Problem) -> list[JointOptions]:
        """The options of each variable of a problem; those of a Share follow from what it connects.

        Raises:
            RuleError: when an op has no rule.
        """
        variables = problem.variables
        found = [self._own(each) for each in variables]
        seen: dict[int, set[SBPs]] = {
            number: set() for number, each in enumerate(variables) if isinstance(each, Share)
        }
        for edge in problem.edges:
            if edge.target in seen:
                seen[edge.target].update(found[edge.source].made(edge.result))
            if edge.source in seen:
                wanted = found[edge.target].wanted(edge.operand)
                seen[edge.source].update(
                    sbps for sbps in wanted if not any(isinstance(sbp, Partial) for sbp in sbps)
                )
        for number, layouts in seen.items():
            share = variables[number]
            assert isinstance(share, Share)
            found[number] = self._shared(share, frozenset(layouts))
        return found

    def _own(self, variable: OpChoice | Given | Share) -> JointOptions:
        if isinstance(variable, Share):
            return JointOptions((), np.zeros(0))
        if isinstance(variable, Given):
            key: object = ("given", variable.spec, variable.thin, variable.choices)
        else:
            key = (variable.call, variable.thin, variable.times, variable.pinned)
        if key not in self._known:
            self._known[key] = (
                self._given(variable.spec, variable.thin, product(*variable.choices))
                if isinstance(variable, Given)
                else self._of_call(variable)
            )
        return self._known[key]

    def _shared(self, share: Share, layouts: frozenset[SBPs]) -> JointOptions:
        key = "shared", share.spec, share.thin, layouts
        if key not in self._known:
            every = (
                tuple(Signature((sbp,), (sbp,)) for sbp in sbps)
                for sbps in sorted(layouts, key=str)
            )
            self._known[key] = self._given(share.spec, share.thin, every)
        return self._known[key]

    def _given(self, spec: TensorSpec, thin: Thin, every: Iterable[PerAxis]) -> JointOptions:
        found = tuple(every)
        fit = tuple(
            one
            for one in found
            if enough_elements(spec.shape, [each.operands[0] for each in one], self.grid, thin)
        )
        return JointOptions(fit or found, np.zeros(len(fit or found)))

    def _of_call(self, work: OpChoice) -> JointOptions:
        fit = [
            (signatures, cost)
            for signatures, cost in self._ways(work)
            if all_have_elements(work.call, signatures, self.grid, work.thin)
        ]
        costs = np.array([cost for _, cost in fit]) * work.times
        return JointOptions(tuple(signatures for signatures, _ in fit), costs)

    def _ways(self, work: OpChoice) -> Iterator[tuple[PerAxis, float]]:
        """Each way to cut a call along all axes, with its cost: work, and what runs inside it."""
        ways: list[tuple[PerAxis, OpCall, float]] = [((), work.call, 0.0)]
        for axis, parts in enumerate(self.grid):
            ways = [
                (
                    (*signatures, one),
                    localize(call, one, parts, 0),
                    cost + self._inside(call, one, axis),
                )
                for signatures, call, cost in ways
                for one in work.pinned[axis : axis + 1] or candidates(call, parts, bool(work.thin))
            ]
        for signatures, call, cost in ways:
            yield signatures, cost + work_cost(call, self.grid, self.cost_model)

    def _inside(self, call: OpCall, one: Signature, axis: int) -> float:
        model = self.cost_model
        return reduction_cost(call, one, self.grid, axis, model) + halo_cost(
            call, one, self.grid, axis, model
        )
