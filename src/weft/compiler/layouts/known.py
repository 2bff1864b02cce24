"""The memory of deductions, and their findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.compiler.layouts.boxing_costs import BoxingCosts, Table
from weft.compiler.layouts.options import GivenOptions, PerAxis, SignatureOptions, WorkOptions
from weft.hardware import CostModel
from weft.ops import Signature


@final
@dataclass(frozen=True)
class LayoutChoice:
    """The choice of a deduction: for each variable, its signature on each axis.

    Attributes:
        signatures: the choices.
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
