"""Program: a compiled training or evaluation step, ready to run on the ranks of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn

from weft.errors import UserError
from weft.ir import LogicalGraph, Plan
from weft.layout import Placement
from weft.planning.stored_step import StoredStep
from weft.program.agreement import run_on_all
from weft.program.checkpoint.checkpoints import give_up
from weft.program.checkpoint.saving import ProgramSaving
from weft.program.core import ProgramCore, one_at_a_time
from weft.program.inspect.inspection import ProgramInspection
from weft.program.live.ownership import disown_variables, own_variables, reads
from weft.program.planning.build import evaluation
from weft.program.planning.step import Step
from weft.program.planning.variants import Planned, Variants
from weft.program.stepping import ProgramSteps
from weft.program.training.training import Training
from weft.strategy.strategy import Strategy


@final
class Program(ProgramSteps, ProgramSaving, ProgramInspection):
    """One step of training or evaluation, compiled. Made by `weft.compile` and `Program.evaluation`."""

    def __init__(self, variants: Variants, step: Step, training: Training | None = None) -> None:
        training = training or Training(variants.setting, step.optimizers)
        super().__init__(ProgramCore(variants, step, training))
        own_variables(self._core.setting.model, self)
        reads(self, lambda: (*variants.constants(), *training.constants()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "a program cannot be copied or pickled: it works on this process's ranks. program.save(path) keeps a run; "
            "compile the model once more for another program"
        )

    @property
    def plan(self) -> Plan:
        """Actors and registers of the ranks of this process; prints as text."""
        return self._core.compiled.plan

    @property
    def graph(self) -> LogicalGraph:
        """The captured step with the layouts of all values and the boxing between them; prints as text."""
        return self._core.compiled.graph

    @property
    def strategy(self) -> Strategy:
        """The user's."""
        return self._core.setting.strategy

    @property
    def placement(self) -> Placement:
        """All its ranks."""
        return self._core.setting.placement

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """The metrics that `metrics=` of `weft.compile` asks for, of the last step; empty before it."""
        return self._core.metrics

    def stored(self, device_type: str = "cpu", strategy: Strategy | None = None) -> StoredStep:
        """The captured step, for plans on other machines: as `weft.Job.stored` gives it."""
        return self._core.step.now().stored(device_type, strategy)

    @one_at_a_time
    def evaluation(self, function: Callable[[nn.Module, Any], Any], example_batch: Any) -> Program:
        """A program that calls `function(model, batch)` with this program's live parameters and buffers.

        The model is in eval mode. `step` of the new program returns what `function` returns, with
        whole tensors.
        """
        self._core.enter("evaluation")
        setting, trained = self._core.setting, self._core.compiled
        example = setting.whole(example_batch)
        first = run_on_all(
            setting.world, "the plan", lambda: evaluation(setting, trained, function, example)
        )
        step = Step(setting.model, function, None, example)

        def plan(batch: Any) -> Planned:
            return evaluation(setting, trained, function, batch, first[0], step.changing)

        return Program(Variants(setting, first, step, plan), step)

    def rows(self, size: int) -> list[int]:
        """The rows of a batch that the ranks of this process take, in order; all rows if it has all ranks.

        All rows, too, if `weft.Buckets` pads batches, because the longest row of all decides the length.
        """
        if self._core.setting.buckets is not None:
            return list(range(size))
        return self._core.variants.rows(size)

    @one_at_a_time
    def close(self) -> None:
        """End the threads of this program. It cannot step afterwards; other programs keep its variables."""
        self._core.close()
        disown_variables(self._core.setting.model, self)
        self._written()
        give_up(self)
