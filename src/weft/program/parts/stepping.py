"""Steps of a program, updates without a step, and the check of a step beside a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from weft.errors import UserError
from weft.program.agreement import told
from weft.program.checksums import BatchSums, OptionsChecksum, Stamps, checksum_of_numbers
from weft.program.data.loader import Loader
from weft.program.data.same_samples import check_same
from weft.program.feeding.cut import CutBatch, uncut
from weft.program.feeding.rows import RowsOfBatch
from weft.program.one_thread import one_at_a_time
from weft.program.parts.core import ProgramCore, ProgramPart
from weft.program.parts.feeding import batches_of
from weft.program.planning.variants import Variants
from weft.program.training.gradients import check_adding
from weft.program.training.step_hooks import (
    call_step_hooks,
    check_step_hooks,
    without_step_hooks,
)
from weft.program.training.training import Training
from weft.program.verification import Subject, Verified, verified
from weft.runtime.executor.rank_executor import RankExecutor


class ProgramSteps(ProgramPart):
    """The steps and updates of a program."""

    def __init__(self, core: ProgramCore) -> None:
        super().__init__(core)
        self._options = OptionsChecksum(core.variants.optimizers)
        # Of the calls of all ranks so far.
        self._chain = 0
        # Those that ran the last step.
        self._ran: Collection[RankExecutor] = ()

    @one_at_a_time
    def step(self, batch: Any, update: bool = True) -> Any:
        """Run one step on every rank of this process: forward, backward, update, and `zero_grad` at the end.

        As `backward()` does, it adds to the gradients that stand in `parameter.grad`, whether steps
        without an update or losses of eager code have left them.

        Args:
            batch: built like the example batch; tensors may have other shapes, for which the step is
                planned when they first come, in some seconds; so it is for other values of Python
                that the step reads, other parameters that are trained. Plain tensors are the whole batch, the
                same on all ranks; each rank takes its part. A leaf that is a global tensor, as
                `weft.from_local` makes, lies there already; with micro-batches it is brought there,
                as each of them is a run of samples of the whole batch.
            update: False updates no parameter; the gradients are added to `parameter.grad` of the
                live model, in the layouts of the plan. `update` uses them, or any optimizer that is
                called; or the next step with an update, which adds its own first, clips the sum,
                and leaves `parameter.grad` None. Buffers are written in every step.

        Returns:
            What the loss function returned when it was captured, with whole tensors in it.

        Raises:
            BatchError: when the batch differs from the example in more than shapes.
            UserError: when the program was closed. In an autocast other than the strategy's, or in
                inference mode, where it trains. When a parameter was replaced by another tensor.
                When a hyperparameter is no number.
                When gradients cannot be added up: there are none, or a scaled loss may skip them.
                When a parameter has a gradient that the update does not know of.
            RankFailure: when a rank failed; the first error is the cause. Another step can be made
                when that was before the first update, as of a batch that cannot be computed with.
        """
        core = self._core
        core.make_ready()
        training, options = core.training, self._options.of(update)
        if training is not None:
            training.gradients.clear_used()
        standing = training is not None and training.gradients.standing()
        adds = not update or standing
        variants = self._adding(update) if adds else core.variants
        batch = batch if isinstance(batch, CutBatch) else core.setting.whole(batch)
        self._check_samples(uncut(batch))
        core.places.check()
        enter = partial(self._enter_step, adding=standing)
        feeds, sums = variants.feeds(batch, core.steps - core.first, enter)
        variants.current.captured.outputs.check_loaded()
        if training is not None:
            if adds and update:
                training.gradients.check_update(variants.current.compiled)
            training.take()
            if adds:
                training.gradients.take()
        stamp = self._stamp(variants, sums, options)
        executors = variants.current.executors.values()
        try:
            results, core.metrics = variants.current.step(
                core.setting, core.steps, feeds, not adds, stamp
            )
        except BaseException as error:
            core.note_failure(error, variants.current.executors, variants.renew)
            raise
        core.steps, core.samples = core.steps + 1, variants.current.captured.batch.rows
        self._ran = executors
        if training is not None:
            compiled, gradients = variants.current.compiled, training.gradients
            if adds:
                gradients.show(compiled)
            done = (
                self._update(training, options)
                if adds and update
                else gradients.updated_by(compiled)
            )
            self._show(training, done if update else None)
        return results

    def run(self, batches: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
        """Make a step of each batch, and give what it returns, in order. Every process must call it, as `step`.

        Actors load the next batches while a step runs, and cut them for the ranks of this process. Where they come from
        a `weft.Loader`, its place is behind the batch of the last step that was made; without workers it loads nothing
        ahead. What other iterables draw, they draw that much earlier, and a batch is as it was when it was loaded;
        those of a list or tuple are read by their steps.

        Args:
            batches: a `weft.Loader`, or anything that can be looped over.
            ahead: how many batches may be loaded before their step; 0 for none.

        Raises:
            UserError: `ahead` cannot be; and as `step` does.
        """
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise UserError(f"program.run: ahead takes a number of batches from 0, found {ahead!r}")
        if not isinstance(batches, Iterable):
            raise UserError(f"program.run takes batches, such as a weft.Loader, found {batches!r}")
        failed = batches.put_back if isinstance(batches, Loader) else lambda: None
        return _steps(self.step, batches_of(self._core, batches, ahead), failed)

    @one_at_a_time
    def update(self) -> None:
        """Update the parameters by what is in their `grad`, clipped as the strategy says; it is None afterwards.

        Parameters whose `grad` is None stay as they are. The gradients are those of steps with
        `update=False`, or of any loss of the live model whose `backward()` was called.

        Raises:
            UserError: when there is no gradient, or the program does not train, or was closed.
            RankFailure: when a rank failed; the first error is the cause.
        """
        core = self._core
        core.make_ready("update")
        training = core.training
        if training is None:
            raise UserError(
                "program.update(): this program has no optimizer; give weft.compile one"
            )
        options = self._options.of(True)
        core.enter(f"update by {training.gradients.text}, options {options:x}")
        core.places.check()
        training.take()
        self._show(training, self._update(training, options))

    @one_at_a_time
    def verify(self, batch: Any) -> Verified:
        """Check that a step gives what one plain eager step of the same code gives, and change nothing.

        A step of the plan runs, and the model, loss function and optimizer run as they are written,
        whole, on one device in every process; then parameters, buffers, states, gradients and the
        user's Python objects are put back. Compared are outputs, unclipped gradients, written buffers,
        updated parameters and the optimizer's states, each by as much as rounding moves it. Random
        ops draw what the plan draws; the precision is the strategy's. With float16 gradients are
        compared by way of the update. Takes the memory of a step on one device, and a few times the
        time of a plain step. Every process must call it.

        Args:
            batch: as `step` takes it.

        Returns:
            What was compared, and the largest differences; prints as text.

        Raises:
            VerificationError: naming the first result that differs, by how much, and the line that
                it is computed for.
            BatchError: when the batch has no data, or is none of this program.
        """
        core = self._core
        core.make_ready("verify")
        core.enter("verify")
        number, metrics = core.steps, core.metrics
        measured = {each for each in core.variants.executors() if each.measured is not None}

        def run(number: int, batch: Any, update: bool) -> Any:
            core.steps = number
            return self.step(batch, update)

        subject = Subject(
            *(core.setting, core.variants, core.training, core.step, number, run),
            lambda: core.metrics,
        )
        try:
            with without_step_hooks(core.variants.optimizers):
                return verified(subject, batch)
        finally:
            core.steps, core.metrics = number, metrics
            # A checked step runs beside what is to be put back.
            for each in set(core.variants.executors()) - measured:
                each.measure()

    def _check_samples(self, batch: Any) -> None:
        """Check that a loader has the same dataset in all processes, where it is at the begin of a loop."""
        if self._core.setting.several and isinstance(batch, RowsOfBatch) and batch.sums:
            self._core.enter("samples of a loader")
            world = self._core.setting.world
            check_same(told(world, "samples", lambda: json.dumps(batch.sums)))

    def _enter_step(self, shapes: str, adding: bool) -> None:
        onto = ", to add to gradients" if adding else ""
        self._chain = self._core.enter(f"step {self._core.steps} on {shapes}{onto}")

    def _stamp(
        self, variants: Variants, sums: BatchSums, options: int
    ) -> Callable[[tuple[int, ...]], int] | None:
        """The stamp of a step's messages; None where no other process takes part."""
        if not self._core.setting.several:
            return None
        numbers = checksum_of_numbers(variants.current.numbers.values())
        outside = variants.current.guards.outside.checksum(self._core.steps)
        return Stamps(sums, options ^ numbers ^ outside, self._chain).among

    def _update(self, training: Training, options: int) -> Collection[str]:
        """Update by the gradients in `parameter.grad`; the keys of the parameters that have one."""
        gradients = training.gradients
        keys, executors = gradients.keys(), gradients.executors()
        if self._core.setting.several:
            stamp = Stamps(BatchSums(), options, self._chain).among
            for executor in executors.values():
                executor.put_stamp(stamp)
        try:
            self._core.metrics = gradients.update(executors)
        except BaseException as error:
            self._core.note_failure(error, executors, gradients.renew)
            raise
        return keys

    def _show(self, training: Training, updated: Collection[str] | None) -> None:
        """Show what a step or an update has made, where it will stay; then call hooks behind an update.

        Copies take what the step has given back.
        """
        training.settle(sum(each.given_back for each in self._ran))
        training.show(updated)
        if updated is not None:
            optimizers = self._core.variants.optimizers
            check_step_hooks(optimizers, self._core.compiled.graph)
            call_step_hooks(optimizers)

    def _adding(self, update: bool) -> Variants:
        """The variants of a step that adds to gradients, whether an update follows or not."""
        check_adding(self._core.compiled.graph, update)
        assert self._core.training is not None  # the check refuses others
        return self._core.training.adding(self._core.enter)


def _steps(
    step: Callable[[Any], Any], batches: Iterator[Any], failed: Callable[[], None]
) -> Iterator[Any]:
    """Make a step of each batch; `failed` is called where one raises."""
    for batch in batches:
        try:
            made = step(batch)
        except BaseException:
            failed()
            raise
        yield made
