"""Plans of one program: for its first batch, for others, and for steps without an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from weft.compiler.options import Options
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import split_parameters, strategy_hints, with_leaves
from weft.layout import Placement
from weft.program.agreement import agreed
from weft.program.live.holds import Lying
from weft.program.planning.build import with_lying
from weft.program.planning.step import Step
from weft.program.planning.variants import Planned, Variants, check_lying, lying_in
from weft.program.setting import Setting
from weft.program.training.training import Training
from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class Planner:
    """The parts that plans of one program have in common.

    Attributes:
        options: of the compiler.
        held: how the variables lie that open programs work with.
    """

    strategy: Strategy
    placement: Placement
    ranks: tuple[int, ...]
    options: Options
    held: Lying

    def plan(
        self,
        step: Step,
        begin: Callable[[str], None] = lambda _: None,
        like: Compiled | None = None,
    ) -> Planned:
        """Capture a step, and compile it; needs no other process.

        Args:
            step: for one shape of the batch.
            begin: is told what begins.
            like: the plan for another shape, which has decided where parameters and buffers lie.
        """
        placements = stage_placements(self.options.stages, self.placement)
        begin("capturing")
        apart = split_parameters(self.strategy, dict(step.model.named_parameters()))
        captured = step.captured(self.placement.device_type, self.options.precision, apart)
        hints = with_leaves(strategy_hints(self.strategy, captured.graph, placements), step.leaves)
        graph, ranks, options = captured.graph, self.ranks, self.options
        held = lying_in(like) if like else self.held
        homes = like.stages.homes if like else held.homes(placements)
        hints = with_lying(hints, held, graph)
        compiled = compile_graph(graph, hints, self.placement, ranks, options, homes, begin, like)
        who = "another program that is open", "close the other program"
        check_lying(compiled, self.held, *who)
        return captured, compiled

    def variants(
        self, setting: Setting, step: Step, first: Planned, training: Training | None
    ) -> Variants:
        """The step for all batches, beginning with `first`, as which variables lie."""
        return Variants(
            setting,
            first,
            step,
            lambda batch: self.plan(step.of_shape(batch), like=first[1]),
            training.know if training else lambda _: None,
        )

    @property
    def bare(self) -> Planner:
        """The same without what belongs to an update, clipping and its norm."""
        return replace(self, options=replace(self.options, clip_norm=None, metrics=()))

    def adding(self, setting: Setting, step: Step, like: Compiled, training: Training) -> Variants:
        """The variants of the step without an update."""
        bare = self.bare
        first = agreed(setting.world, "the plan", lambda: bare.plan(step.now(), like=like))
        return bare.variants(setting, step, first, training)
