"""The costs of a problem over all axes at once, as tables of variables and of pairs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from weft.compiler.layouts.boxing_costs import BoxingCosts, Table
from weft.compiler.layouts.descent import joined
from weft.compiler.layouts.intent import forbidden
from weft.compiler.layouts.joint.options import JointOptions, SBPs
from weft.compiler.layouts.known import ReadCosts
from weft.compiler.layouts.problem import Problem, ReadEdge
from weft.hardware import CostModel


@final
@dataclass(frozen=True)
class JointTables:
    """Tables of problems on a grid; equal edges share them.

    Attributes:
        grid: the number of ranks along each axis.
        cost_model: of boxing.
    """

    grid: tuple[int, ...]
    cost_model: CostModel
    _boxing: BoxingCosts = field(init=False, repr=False)
    _known: dict[object, tuple[ReadCosts, object]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_boxing", BoxingCosts(self.grid, self.cost_model))

    def of(
        self, problem: Problem, options: Sequence[JointOptions]
    ) -> tuple[list[Table], dict[tuple[int, int], Table], float]:
        """Costs of variables, of pairs of variables, and what is charged once for what is forbidden."""
        edges = [
            (edge, self._read(edge, options[edge.source], options[edge.target]))
            for edge in problem.edges
        ]
        return joined([each.costs for each in options], edges)

    def _read(self, edge: ReadEdge, source: JointOptions, target: JointOptions) -> ReadCosts:
        ends = id(source), edge.result, id(target), edge.operand
        key = edge.spec, *ends, edge.intents, edge.times
        if key not in self._known:
            made, wanted = source.made(edge.result), target.wanted(edge.operand)
            table = self._boxing.joint_table(edge.spec, made, wanted) * edge.times
            # The options are kept, so that their identities stay theirs.
            costs = ReadCosts(table, self._forbidden(edge, made, wanted))
            self._known[key] = costs, (source, target)
        return self._known[key][0]

    def _forbidden(
        self, edge: ReadEdge, made: tuple[SBPs, ...], wanted: tuple[SBPs, ...]
    ) -> Table | None:
        """1 where an intent forbids what happens along some axis."""
        bans = [
            forbidden(
                intent,
                tuple(sbps[axis] for sbps in made),
                tuple(sbps[axis] for sbps in wanted),
                self.cost_model,
            )
            for axis, intent in enumerate(edge.intents)
        ]
        said = [ban for ban in bans if ban is not None]
        found: Table | None = np.max(said, axis=0) if said else None
        return found
