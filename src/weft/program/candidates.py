"""Strategies that a search found, as programs of a step would have them, beside those that are open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.compiler.options import options_of
from weft.errors import UserError
from weft.layout import Placement
from weft.program.agreement import agreed
from weft.program.live.holds import Lying
from weft.program.planner import Planner
from weft.program.planning.auto import PlacedStrategy, agreed_costs
from weft.program.planning.build import local_ranks
from weft.program.planning.step import Step
from weft.runtime.compiled.choice import Kernels
from weft.runtime.world.world import World
from weft.strategy.strategy import Strategy

# So many more strategies are looked at where the model lies somewhere already.
SPARE = 12


@final
@dataclass(frozen=True)
class Candidates:
    """Plans of candidates for one step.

    Attributes:
        held: how open programs lay the model.
    """

    world: World
    step: Step
    kernels: Kernels
    held: Lying

    def planner(self, strategy: Strategy, placement: Placement) -> Planner:
        """The planner of a candidate. Every process must call it."""
        modules = (path for path, _ in self.step.model.named_modules(remove_duplicate=False))
        options = replace(
            options_of(strategy),
            modules=tuple(path for path in modules if path),
            costs=agreed_costs(self.world),
            own_kernels=self.kernels != "torch",
        )
        return Planner(strategy, placement, local_ranks(self.world, placement), options, self.held)

    def lying_alike(self, found: Sequence[PlacedStrategy], count: int) -> list[PlacedStrategy]:
        """The first of those that lay the model as open programs do. Every process must call it.

        Args:
            found: the quickest first.
            count: how many are returned at most.

        Raises:
            UserError: on all ranks, when none does.
        """
        alike: list[PlacedStrategy] = []
        refused = UserError("there is none")
        for candidate in found:
            planner = self.planner(*candidate)
            try:
                agreed(self.world, "the plan", lambda: planner.plan(self.step))  # noqa: B023
            except UserError as error:
                refused = error
                continue
            alike.append(candidate)
            if len(alike) == count:
                break
        if not alike:
            raise UserError(
                f"strategy=: of {len(found)} strategies that the search would take none lays the model as a program "
                f"does that is open: {refused}. Give program.strategy of that program, take its program.evaluation, "
                "or close it"
            )
        return alike
