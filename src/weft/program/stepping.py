"""Steps of a program and of its loops, updates without a step, and the check of a step beside a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from weft.capture.batch import is_dense
from weft.capture.tree import flatten, unflatten
from weft.errors import UserError, is_whole, wrong
from weft.ir.plan import RankPlan
from weft.program.agreement import gathered
from weft.program.checksums import (
    BatchChecksums,
    OptionsChecksum,
    StepChecksums,
    checksum_of_numbers,
)
from weft.program.core import ProgramCore, ProgramPart, one_at_a_time
from weft.program.data.feed import CutBatch, RowsOfBatch, is_on_the_host, whole_batch_of
from weft.program.data.loader import Loader
from weft.program.data.loading import PrefetchedBatches, loading_plan, prefetched, with_waits
from weft.program.data.samples import check_same
from weft.program.planning.variants import Variants
from weft.program.training.gradients import check_adding
from weft.program.training.training import without_step_hooks
from weft.program.verification import Subject, Verified, verify_step
from weft.runtime.executor.rank_executor import RankExecutor
from weft.runtime.memory.state import prefetching_copies
from weft.tensor import GlobalTensor


class ProgramSteps(ProgramPart):
    """The steps and updates of a program."""

    def __init__(self, core: ProgramCore) -> None:
        super().__init__(core)
        self._options = OptionsChecksum(core.variants.optimizers)
        # For the calls of all ranks so far.
        self._chain = 0
        # The ones that ran the last step.
        self._ran: Collection[RankExecutor] = ()

    @one_at_a_time
    def step(self, batch: Any, update: bool = True) -> Any:
        """Run one step on every rank of this process: forward, backward, update, and `zero_grad` at the end.

        Like `backward()`, the step adds to the gradients that are in `parameter.grad`, whether steps
        without an update or losses of eager code have left them.

        Args:
            batch: built like the example batch; tensors may have other shapes, for which the step is planned when
                they first come, in some seconds; so it is for other values of Python that the step reads, other
                parameters that are trained. Plain tensors are the whole batch, the same on all ranks; each rank takes
                its part. A leaf that is a global tensor, as `weft.from_local` makes, is there already; with
                micro-batches it is brought there, as each of them is a run of samples of the whole batch.
            update: False updates no parameter; the gradients are added to `parameter.grad` of the
                live model, in the layouts of the plan. `update` uses them, or any optimizer that is
                called; or the next step with an update, which adds its own first, clips the sum,
                and leaves `parameter.grad` None. Buffers are written in every step.

        Returns:
            The result of the loss function, with whole tensors.

        Raises:
            BatchError: when the batch differs from the example in more than shapes.
            UserError: when the program was closed. In an autocast other than the strategy's, or in inference mode,
                where it trains. When a parameter was replaced by another tensor. When a hyperparameter is not a
                number. When gradients cannot be added up: there are none, or a scaled loss may skip them. When a
                parameter has a gradient but no update.
            RankFailure: when a rank failed; the first error is the cause. Another step can be made
                when that was before the first update, as of a batch that cannot be computed with.
        """
        core, gradients = self._core, self._core.training.gradients
        core.make_ready()
        options = self._options.of(update)
        gradients.clear_used()
        standing = gradients.standing()
        if standing or not update:
            return self._accumulate(batch, options, update, standing)
        feeds, sums = self._fed(core.variants, batch)
        core.training.take()
        results = self._run(core.variants, feeds, self._stamp(core.variants, sums, options), True)
        self._show(gradients.updated_by(core.compiled))
        return results

    def _accumulate(self, batch: Any, options: int, update: bool, standing: bool) -> Any:
        """Add to the gradients in `parameter.grad`, which some may be in already; then update by them, where asked."""
        core, gradients = self._core, self._core.training.gradients
        check_adding(core.compiled.graph, update)
        variants = core.training.adding(core.enter)
        feeds, sums = self._fed(variants, batch, ", to add to gradients" if standing else "")
        compiled = variants.current.compiled
        if update:
            gradients.check_update(compiled)
        core.training.take()
        gradients.take()
        results = self._run(variants, feeds, self._stamp(variants, sums, options), False)
        gradients.show(compiled)
        self._show(self._update(options) if update else None)
        return results

    def _run(
        self,
        variants: Variants,
        feeds: Mapping[int, Mapping[str, Tensor]],
        checksum: Callable[[tuple[int, ...]], int] | None,
        update: bool,
    ) -> Any:
        core, variant = self._core, variants.current
        try:
            results, core.metrics = variant.step(core.setting, core.steps, feeds, update, checksum)
        except BaseException as error:
            core.note_failure(error, variant.executors, variants.renew)
            raise
        core.steps, core.samples = core.steps + 1, variant.captured.batch.rows
        self._ran = variant.executors.values()
        return results

    def run(self, batches: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
        """Make a step with each batch, and yield its result, in order. Every process must call it, as `step`.

        Actors load the next batches while a step runs, and cut them for the ranks of this process. If they come
        from a `weft.Loader`, its place is after the batch of the last step that was made; without workers it loads
        nothing ahead. Other iterables draw their random numbers earlier, and a batch keeps the values it had
        when loaded; batches of a list or tuple are read by their steps.

        Args:
            batches: a `weft.Loader`, or anything that can be looped over.
            ahead: how many batches may be loaded before their step; 0 for none.

        Raises:
            UserError: `ahead` is invalid; and as `step`.
        """
        if not is_whole(ahead, 0):
            raise wrong("program.run: ahead", "a number of batches from 0", ahead)
        if not isinstance(batches, Iterable):
            raise wrong("program.run: batches", "batches, such as a weft.Loader", batches)

        def steps() -> Iterator[Any]:
            for batch in batches_of(self._core, batches, ahead):
                try:
                    made = self.step(batch)
                except BaseException:
                    if isinstance(batches, Loader):
                        batches.put_back()
                    raise
                yield made

        return steps()

    @one_at_a_time
    def update(self) -> None:
        """Update the parameters with their `grad`, clipped as the strategy says; afterwards `grad` is None.

        Parameters whose `grad` is None stay as they are. The gradients are those of steps with
        `update=False`, or of any loss of the live model whose `backward()` was called.

        Raises:
            UserError: when there is no gradient, or the program does not train, or was closed.
            RankFailure: when a rank failed; the first error is the cause.
        """
        core = self._core
        core.make_ready("update")
        if not core.training.optimizers:
            raise UserError(
                "program.update(): this program has no optimizer; give weft.compile one"
            )
        options = self._options.of(True)
        core.enter(f"update by {core.training.gradients.text}, options {options:x}")
        core.places.check()
        core.training.take()
        self._show(self._update(options))

    @one_at_a_time
    def verify(self, batch: Any) -> Verified:
        """Check that a step gives what one plain eager step of the same code gives, and change nothing.

        A step of the plan runs, and the model, loss function and optimizer run as they are written, whole, on one
        device in every process; then parameters, buffers, states, gradients and the user's Python objects are put
        back. It compares outputs, unclipped gradients, written buffers, updated parameters and optimizer states, each
        within a tolerance for rounding. Random ops draw the plan's numbers; the precision is the strategy's. With
        float16 only the update is compared, not gradients. Takes the memory of a step on one device, and a few times
        the time of a plain step. Every process must call it.

        Args:
            batch: as `step` takes it.

        Returns:
            The comparison with the largest differences; prints as text.

        Raises:
            VerificationError: naming the first result that differs, by how much, and the line that
                it is computed for.
            BatchError: when the batch has no data, or does not fit this program.
        """
        core = self._core
        core.make_ready("verify")
        core.enter("verify")
        number, metrics = core.steps, core.metrics
        measured = {each for each in core.variants.executors() if each.measured is not None}
        try:
            with without_step_hooks(core.variants.optimizers):
                return verify_step(Subject(core, self.step, number), batch)
        finally:
            core.steps, core.metrics = number, metrics
            # A checked step runs beside what is to be put back.
            for each in set(core.variants.executors()) - measured:
                each.measure()

    def _fed(
        self, variants: Variants, batch: Any, onto: str = ""
    ) -> tuple[dict[int, dict[str, Tensor]], BatchChecksums]:
        """The parts of the batch that ranks take, its checksums; `variants.current` is the plan for it then."""
        core = self._core
        batch = batch if isinstance(batch, CutBatch) else core.setting.whole(batch)
        given = whole_batch_of(batch)
        # At the begin of a loop: has a loader the same dataset in all processes?
        if core.setting.world.several and isinstance(given, RowsOfBatch) and given.sums:
            core.enter("samples of a loader")
            check_same(gathered(core.setting.world, "samples", lambda: json.dumps(given.sums)))
        core.places.check()

        def enter(shapes: str) -> None:
            self._chain = core.enter(f"step {core.steps} on {shapes}{onto}")

        found = variants.feeds(batch, core.steps - core.first, enter)
        variants.current.captured.outputs.check_loaded()
        return found

    def _stamp(
        self, variants: Variants, sums: BatchChecksums, options: int
    ) -> Callable[[tuple[int, ...]], int] | None:
        if not self._core.setting.world.several:
            return None
        numbers = checksum_of_numbers(variants.current.numbers.values())
        outside = variants.current.guards.outside.checksum(self._core.steps)
        return StepChecksums(sums, options ^ numbers ^ outside, self._chain).among

    def _update(self, options: int) -> Collection[str]:
        """Update by the gradients in `parameter.grad`; the keys of the parameters that have one."""
        core, gradients = self._core, self._core.training.gradients
        keys, executors = gradients.keys(), gradients.executors()
        if core.setting.world.several:
            checksum = StepChecksums(BatchChecksums(), options, self._chain).among
            for executor in executors.values():
                executor.put_checksum(checksum)
        try:
            core.metrics = gradients.update(executors)
        except BaseException as error:
            core.note_failure(error, executors, gradients.close)
            raise
        return keys

    def _show(self, updated: Collection[str] | None) -> None:
        """Show what a step or an update has made; copies of new states take what the step has given back."""
        room = sum(each.given_back for each in self._ran)
        self._core.training.show(self._core.compiled.graph, updated, room)


def batches_of(core: ProgramCore, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
    """The batches in order, of which up to `ahead` are loaded, and cut, before they are asked for.

    A batch is as it was when it was loaded, whatever becomes of its tensors then; a list's are read by their steps.
    The core gets the acts that load, and the wait for each batch.
    """

    def plan(rows: Sequence[int] | None) -> RankPlan:
        feeder = core.variants.current.feeder
        core.loading = loading_plan(feeder.first, feeder.loaded_leaves(rows), ahead)
        return core.loading

    way = PrefetchedBatches(plan, partial(_cut, core), core.note_load) if ahead else None
    if isinstance(batches, Loader):
        items = batches._taken(way)
    elif way is None or isinstance(batches, list | tuple):
        items = iter(batches)
    else:
        given: Iterator[Any] = map(_copied, batches)
        if isinstance(batches, DataLoader) and type(batches).__iter__ is DataLoader.__iter__:
            # Nobody writes any more into data from another process.
            given = iter(batches) if batches.num_workers else given
        items = prefetched(given, way.plan(None), way.cut, way.note)
    return with_waits(items, core.note_wait)


def _cut(core: ProgramCore, batch: Any) -> Any:
    """The batch, cut for its step; as it is where it cannot be cut yet.

    An error here is left to the step, which does the work again and reports it. If processes bring parts of a
    batch, making it whole takes all of them.
    """
    setting = core.setting
    try:
        by_rows = setting.by_rows and not isinstance(batch, RowsOfBatch)
        if by_rows or not is_on_the_host(batch):
            return batch
        with (
            torch.no_grad(),
            prefetching_copies(map(setting.world.device, setting.variables)) as arrival,
        ):
            whole = setting.whole(batch)
            found = core.variants.cut(whole)
    except Exception:
        return batch
    return batch if found is None else CutBatch(whole, *found, arrival)


def _copied(batch: Any) -> Any:
    """The batch with tensors of its own: an iterable may write the next one into the same memory."""
    if isinstance(batch, RowsOfBatch):
        return replace(batch, batch=_copied(batch.batch))
    try:
        found, tree = flatten(batch, "batch")
    except Exception:  # its step says why
        return batch
    return unflatten([_copy(leaf) for _, leaf in found], tree)


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.requires_grad:
        return leaf
    with torch.no_grad():
        if isinstance(leaf, GlobalTensor):
            return GlobalTensor(leaf.spec, tuple(each.clone() for each in leaf.locals))
        return leaf.clone() if is_dense(leaf) else leaf
