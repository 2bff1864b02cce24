"""Program: a compiled training or evaluation step, ready to run on the ranks of this process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.capture.optimizers.groups import Optimizers
from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.hardware.planning_costs import costs_text
from weft.ir import LogicalGraph, Plan
from weft.ir.logical import Input
from weft.layout import Placement
from weft.planning.stored_step import StoredStep
from weft.program.agreement import BatchSums, OptionsChecksum, Stamps, checksum_of_numbers
from weft.program.data.ahead import loaded_ahead, with_waits
from weft.program.data.loader import Loader
from weft.program.everyone import agreed, told
from weft.program.explain.beside import BoxTimes, box_times, step_line
from weft.program.explain.details import details as tables
from weft.program.explain.details import details_of
from weft.program.explain.explain import explain
from weft.program.explain.kernels import kernel_text, replay_text
from weft.program.explain.memory import ProgramMemory, program_memory
from weft.program.explain.short import short_html
from weft.program.explain.words import title
from weft.program.live.holds import hold, let_go, reads
from weft.program.live.places import LivePlaces
from weft.program.live.variables import load_whole, state_dict_names
from weft.program.modes import check_modes
from weft.program.one_thread import lock_of, one_at_a_time
from weft.program.planning.build import build, evaluation, gathering
from weft.program.planning.recovery import Failed
from weft.program.planning.step import Step
from weft.program.planning.variants import Planned, Variants
from weft.program.predict import costs_in, predicted
from weft.program.saving.groups import about_program
from weft.program.saving.load import load
from weft.program.saving.manifest import Manifest, put_back
from weft.program.saving.memory.shelf import shelf_of
from weft.program.saving.memory.snapshots import Snapshots
from weft.program.saving.program_state import ProgramState
from weft.program.saving.save import save
from weft.program.saving.writing import Writing
from weft.program.trace import Trace, gather_trace
from weft.program.training.gradients import check_adding
from weft.program.training.states import full_states
from weft.program.training.training import Training
from weft.program.verification import Subject, Verified, verified
from weft.report import Report, write_report
from weft.runtime.executor.device_executor import DeviceExecutor
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.recording import Record
from weft.runtime.world.world import World
from weft.simulator.results.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.tensor.divergence import forget, note_write
from weft.units import Seconds

_log = logging.getLogger("weft")


@final
class Program:
    """One step of training or evaluation, compiled. Made by `weft.compile` and `Program.evaluation`."""

    def __init__(self, variants: Variants, step: Step, training: Training | None = None) -> None:
        self._variants = variants
        self._step = step
        self._training = training
        # What `metrics=` of `weft.compile` asks for, of the last step.
        self.metrics: Mapping[str, Tensor] = {}
        self._setting = variants.setting
        self._options = OptionsChecksum(variants.optimizers)
        self._number = self.world.calls.new_program()
        self._steps = self._chain = 0
        # For which the last step of `run` waited for its batch; None where there was none.
        self._waited: Seconds | None = None
        self._failed: Failed | None = None
        self._writing: Writing | None = None
        # By the folder of the checkpoints that they belong to.
        self._snapshots: dict[Path, Snapshots] = {}
        self.working = lock_of(self.world)
        # By the number of the plan.
        self._predicted: dict[int, Simulation] = {}
        # Threads and groups end with the program also when nobody closes it.
        self._close = weakref.finalize(self, _close_all, variants, training)
        hold(self._setting.model, self)
        reads(self, lambda: _constants_of(variants, training))
        self._places = LivePlaces(self._setting.model, self._setting.variables)

    def __repr__(self) -> str:
        said = "; ".join((title(self.graph), f"batch {self._batch_text}", self._steps_text))
        return f"<weft.Program: {said}>"

    def _repr_html_(self) -> str:
        """A short form of `explain`, which notebooks show; it simulates nothing and asks no other process."""
        more = {"batch": self._batch_text, "steps": self._steps_text}
        return short_html(self._compiled, self._setting.options, self.memory(), more)

    @property
    def _batch_text(self) -> str:
        return ", ".join(
            f"{node.key} {node.value.dtype}{list(node.value.shape)}"
            for node in self.graph.of_kind(Input)
            if node.role == "batch"
        )

    @property
    def _steps_text(self) -> str:
        return f"{self._steps} steps made" if self._close.alive else "closed"

    def _enter_step(self, shapes: str, adding: bool) -> None:
        onto = ", to add to gradients" if adding else ""
        self._chain = self._enter(f"step {self._steps} on {shapes}{onto}")

    def _enter(self, what: str) -> int:
        """A call begins that all ranks must make."""
        return self.world.calls.enter(f"{what} of program {self._number}")

    @property
    def world(self) -> World:
        """The ranks of this process."""
        return self._setting.world

    @property
    def _compiled(self) -> Compiled:
        return self._variants.current.compiled

    @property
    def _executors(self) -> Mapping[int, ThreadExecutor | DeviceExecutor]:
        return self._variants.current.executors

    @property
    def plan(self) -> Plan:
        """Actors and registers of the ranks of this process; prints as text."""
        return self._compiled.plan

    @property
    def graph(self) -> LogicalGraph:
        """The captured step with the layouts of all values and the boxing between them; prints as text."""
        return self._compiled.graph

    @property
    def strategy(self) -> Strategy:
        """The user's."""
        return self._setting.strategy

    @property
    def steps(self) -> int:
        """The number of steps that were made, those before a checkpoint that was loaded included."""
        return self._steps

    @property
    def placement(self) -> Placement:
        """All its ranks."""
        return self._setting.placement

    @property
    def predicted(self) -> Simulation:
        """A step of the current plan on this machine, simulated when it is first asked for.

        Its costs are those that `weft measure` has found here for as many ranks, processes and threads. Where it found
        none, and for calls that it did not meet, they are estimates, and `estimates` of the result says so.
        """
        variant = self._variants.current
        if variant.number not in self._predicted:
            costs = costs_in(self.world)
            found = predicted(variant.captured.graph, variant.compiled, costs)
            self._predicted[variant.number] = found
        return self._predicted[variant.number]

    def stored(self, device_type: str = "cpu", strategy: Strategy | None = None) -> StoredStep:
        """The captured step, for plans on other machines: as `weft.Job.stored` gives it."""
        return self._step.stored(device_type, strategy)

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
        self._make_ready()
        training, options = self._training, self._options.of(update)
        if training is not None:
            training.gradients.clear_used()
        standing = training is not None and training.gradients.standing()
        adds = not update or standing
        variants = self._adding(update) if adds else self._variants
        batch = self._setting.whole(batch)
        self._places.check()
        enter = partial(self._enter_step, adding=standing)
        feeds, sums = variants.feeds(batch, self._steps, enter)
        if training is not None:
            if adds and update:
                training.gradients.check_update(variants.current.compiled)
            training.take()
            if adds:
                training.gradients.take()
        stamp = None
        if self._setting.several:
            numbers = checksum_of_numbers(variants.current.numbers.values())
            stamp = Stamps(sums, options ^ numbers, self._chain).among
        try:
            results, self.metrics = variants.current.step(
                self._setting, self._steps, feeds, not adds, stamp
            )
        except BaseException as error:
            self._note_failure(error, variants.current.executors, variants.renew)
            raise
        self._steps += 1
        if training is not None:
            if adds:
                training.gradients.show(variants.current.compiled)
            if adds and update:
                self._update(training, options)
            training.show(update)
        return results

    def run(self, batches: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
        """Make a step of each batch, and give what it returns, in order. Every process must call it, as `step`.

        A thread loads the next batches while a step runs. Where they come from a `weft.Loader`, its place is behind the
        batch of the last step that was made; what other iterables draw, they draw that much earlier.

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
        if isinstance(batches, Loader):
            return self._run(batches.ahead(ahead), batches.put_back)
        return self._run(loaded_ahead(iter(batches), ahead), lambda: None)

    def _run(self, batches: Iterator[Any], failed: Callable[[], None]) -> Iterator[Any]:
        """Make a step of each batch; `failed` is called where one raises."""
        for batch, waited in with_waits(batches):
            self._waited = waited
            try:
                made = self.step(batch)
            except BaseException:
                failed()
                raise
            yield made

    @one_at_a_time
    def update(self) -> None:
        """Update the parameters by what is in their `grad`, clipped as the strategy says; it is None afterwards.

        Parameters whose `grad` is None stay as they are. The gradients are those of steps with
        `update=False`, or of any loss of the live model whose `backward()` was called.

        Raises:
            UserError: when there is no gradient, or the program does not train, or was closed.
            RankFailure: when a rank failed; the first error is the cause.
        """
        self._make_ready()
        training = self._training
        if training is None:
            raise UserError(
                "program.update(): this program has no optimizer; give weft.compile one"
            )
        options = self._options.of(True)
        self._enter(f"update by {training.gradients.text}, options {options:x}")
        self._places.check()
        training.take()
        self._update(training, options)
        training.show(True)

    def _update(self, training: Training, options: int) -> None:
        gradients = training.gradients
        executors = gradients.executors()
        if self._setting.several:
            stamp = Stamps(BatchSums(), options, self._chain).among
            for executor in executors.values():
                executor.put_stamp(stamp)
        try:
            self.metrics = gradients.update(executors)
        except BaseException as error:
            self._note_failure(error, executors, gradients.renew)
            raise

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
        self._make_ready()
        self._enter("verify")
        number, metrics = self._steps, self.metrics

        def run(batch: Any, update: bool) -> Any:
            self._steps = number
            return self.step(batch, update)

        try:
            return verified(
                Subject(self._setting, self._variants, self._training, self._step, number, run),
                batch,
            )
        finally:
            self._steps, self.metrics = number, metrics

    def _make_ready(self) -> None:
        """Check that the program is open and no mode of torch around; after a failure, make new executors."""
        if not self._close.alive:
            raise UserError("this program was closed, and cannot step; compile another one")
        setting, trains = self._setting, self._training is not None
        precision = setting.options.precision
        check_modes("the program is called", setting.placement.device_type, precision, trains)
        if self._failed is not None:
            self._enter("recovery")
            self._failed.recover(self._setting)
            self._failed = None

    def _note_failure(
        self, error: BaseException, executors: Mapping[int, Any], renew: Callable[[], None]
    ) -> None:
        forget()
        drop = self._training.gradients.drop if self._training is not None else lambda: None
        self._failed = Failed(self._steps, error, executors, renew, drop)

    def _adding(self, update: bool) -> Variants:
        """The variants of a step that adds to gradients, whether an update follows or not."""
        check_adding(self.graph, update)
        assert self._training is not None  # the check refuses others
        return self._training.adding(self._enter)

    @one_at_a_time
    def evaluation(self, function: Callable[[nn.Module, Any], Any], example_batch: Any) -> Program:
        """A program that calls `function(model, batch)` with this program's live parameters and buffers.

        The model is in eval mode. `step` of the new program returns what `function` returns, with
        whole tensors.
        """
        self._enter("evaluation")
        setting, trained = self._setting, self._compiled

        example = setting.whole(example_batch)
        first = agreed(
            setting.world, "the plan", lambda: evaluation(setting, trained, function, example)
        )

        step = Step(setting.model, function, None, example)

        def plan(batch: Any) -> Planned:
            return evaluation(setting, trained, function, batch, first[0], step.changing)

        return Program(Variants(setting, first, step, plan), step)

    @one_at_a_time
    def full_state_dict(self, masters: bool = False) -> dict[str, Tensor]:
        """Whole copies of all parameters and buffers, under the names of the model's `state_dict()`.

        Every process must call it. The tensors are on the placement's device, the same on every
        rank.

        Args:
            masters: give the float32 master of each parameter that has one, in place of what it is
                when rounded, so that `load_full_state_dict` goes on exactly there.
        """
        self._enter("full_state_dict")
        compiled = gathering(self._setting, self._compiled, masters)
        executors = build(self._setting, {}, compiled, Optimizers())
        try:
            whole = self._setting.run(lambda rank: executors[rank].step({}))
        finally:
            for executor in executors.values():
                executor.close()
        names = state_dict_names(self._setting.model)
        return {name: whole[key] for name, key in names.items()}

    @one_at_a_time
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from whole tensors, as `full_state_dict` gives them.

        Masters take the values as they are given, parameters what they are when rounded.

        Raises:
            UserError: naming the entries that are missing, unknown, or of another shape.
        """
        self._enter("load_full_state_dict")
        load_whole(self._setting, self.graph, state)
        if self._setting.several:
            note_write(self._setting.placement, "load_full_state_dict", state.values())
        if self._failed is not None:
            self._failed.loaded = True

    @one_at_a_time
    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """`optimizer.state_dict()` with whole, plain copies of all states, on every process, which all must call it.

        `load_state_dict` takes it: of this optimizer, compiled or released, and of one on a single
        device.

        Args:
            optimizer: which of several; by default the only one.

        Raises:
            UserError: when the program was compiled without that optimizer, or with several and none
                is named.
        """
        found = self._step.optimizers.each
        if optimizer is None and len(found) == 1:
            (optimizer,) = found
        if self._training is None or not any(optimizer is one for one in found):
            raise UserError(
                f"full_optimizer_state_dict: the program has {len(found)} optimizers; name one of them, "
                "full_optimizer_state_dict(optimizer)"
            )
        assert optimizer is not None  # it is one of those
        self._enter("full_optimizer_state_dict")
        self._training.take()
        return full_states(optimizer)

    @one_at_a_time
    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        replace: bool = False,
    ) -> None:
        """Write a checkpoint: parameters, buffers, optimizer states, masters, loss scale, options of groups, steps.

        It is a folder of safetensors files, as `torch.distributed.checkpoint` writes them, in which each tensor
        stands once, under the names that a single device has ("model.blocks.0.weight",
        "optimizer.state.blocks.0.weight.exp_avg"), and "weft.json" with all that is no tensor. It appears at `path`
        whole or not at all. Every process must call it.

        Args:
            path: on a file system that all processes see.
            extra: more that `load` gives back: numbers, texts, whole tensors, lists and dicts of them, and objects with
                `state_dict` and `load_state_dict` such as learning-rate schedulers. Those of the first process.
            wait: False goes on as soon as all is copied to host memory; a thread writes meanwhile. The next `save`,
                `load`, `wait_for_saved` and `close` wait for it, and raise what has failed.
            replace: True puts it in the place of what is at `path`, once it is whole; else nothing may be there.

        Raises:
            UserError: on every process, when one cannot write; gradients wait for an update; or `extra` holds something
                else.
        """
        place = checkpoint_path(path)
        self._make_ready()
        self._enter(f"save {place}")
        state, about = self._to_save("save")
        before, self._writing = self._writing, None
        self._writing = save(state, place, about, extra or {}, before, wait, replace)

    def _to_save(self, call: str) -> tuple[ProgramState, dict[str, Any]]:
        """The content of a checkpoint: tensors and states, and what is neither, as JSON."""
        state = self._state()
        if self._training is not None:
            self._training.take()
            self._check_no_gradients(call)
        return state, about_program(state, self._steps, self._step.optimizers)

    @one_at_a_time
    def save_in_memory(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Take a snapshot: copy what a checkpoint holds into memory of this host, and of another one.

        It lies in files of a memory file system that outlive the processes (`weft run` gives them a folder), two
        generations of it. The call waits until the snapshot before is whole, and for a copy of what this process
        saves; a thread sends it to another host. Every process must call it. Where there is no room a warning says so,
        once, and there are none.

        Args:
            path: the folder of the checkpoints that it belongs to.
            extra: as `save` takes it.

        Raises:
            UserError: on every process, when there is no folder for snapshots; and as `save` does.
        """
        place = checkpoint_path(path)
        self._make_ready()
        self._enter(f"save {place} in memory")
        state, about = self._to_save("save_in_memory")
        self._snapshots_of(place).take(state, self._steps, about, extra or {})

    @one_at_a_time
    def wait_for_memory(self) -> None:
        """Wait until the last snapshot is whole, here and on the other hosts. Every process may call it, or none."""
        for each in self._snapshots.values():
            each.wait()

    @one_at_a_time
    def saved_in_memory(self, path: str | Path) -> list[int]:
        """The steps of the snapshots that count, the newest last. Every process must call it.

        Args:
            path: the folder of the checkpoints that they belong to.

        Raises:
            UserError: on every process, when there is no folder for snapshots.
        """
        place = checkpoint_path(path)
        self._enter(f"snapshots of {place}")
        return [each.step for each in self._snapshots_of(place).there()]

    @one_at_a_time
    def load_from_memory(
        self, path: str | Path, step: int, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Go on from a snapshot, as `load` does from a checkpoint. Every process must call it.

        Each host gets the files that its ranks read and that it does not have from one that has them.

        Args:
            path: the folder of the checkpoints that it belongs to.
            step: one of `saved_in_memory`.
            extra: as `load` takes it.

        Raises:
            DamagedCheckpoint: on every process: the parts of some ranks are on no host any more, or damaged.
            UserError: as `load` does.
        """
        place = checkpoint_path(path)
        if not self._close.alive:
            raise UserError("this program was closed, and cannot load; compile another one")
        self._enter(f"load {place} from memory, step {step}")
        with self._snapshots_of(place).reading(step) as reading:
            return self._load(reading.folder, extra or {}, bring=reading.bring)

    def _snapshots_of(self, place: Path) -> Snapshots:
        if place not in self._snapshots:
            self._snapshots[place] = Snapshots(self.world, shelf_of(self.world, place))
        return self._snapshots[place]

    def _check_no_gradients(self, call: str) -> None:
        if self._training is not None and self._training.gradients.standing():
            raise UserError(
                f"program.{call}: gradients wait in parameter.grad, and a checkpoint holds none; call "
                "program.update() or model.zero_grad() first"
            )

    @one_at_a_time
    def wait_for_saved(self) -> None:
        """Wait until a checkpoint that `save` still writes is there. Every process must call it.

        Raises:
            UserError: on every process, when one could not write.
        """
        self._enter("wait for the last checkpoint")
        agreed(self.world, "what was written", self._written)

    def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    @one_at_a_time
    def load(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        model_only: bool = False,
    ) -> dict[str, Any]:
        """Go on from a checkpoint that `save` wrote, in any layout, on any number of ranks.

        Files that `torch.distributed.checkpoint` has written as safetensors are read too, with names as `save` gives
        them or the plain ones of a model's `state_dict()`; states that they lack begin anew, or stay. Each rank reads
        what it holds. Every process must call it.

        Args:
            path: the folder.
            extra: objects whose `load_state_dict` gets what `save` had under the same name.
            model_only: True reads parameters and buffers, and leaves optimizers, steps and extras as they are.

        Returns:
            What `save` was given as `extra`.

        Raises:
            UserError: on every process, before anything is written: there is no checkpoint, a file is damaged or
                missing, or it is of another model, optimizer or seed.
        """
        place = checkpoint_path(path)
        if not self._close.alive:
            raise UserError("this program was closed, and cannot load; compile another one")
        self._enter(f"load {place}")
        agreed(self.world, "the last checkpoint", self._written)
        agreed(self.world, "its place", lambda: put_back(place) if self.is_first else None)
        return self._load(place, extra or {}, model_only)

    def _load(
        self,
        place: Path,
        extra: Mapping[str, Any],
        model_only: bool = False,
        bring: Callable[[Manifest, Collection[str]], None] | None = None,
    ) -> dict[str, Any]:
        if self._failed is None:
            self._check_no_gradients("load")
        optimizers = self._step.optimizers
        found = load(self._state(), place, optimizers, extra, model_only, bring)
        self._steps = int(found.about.get("steps", self._steps))
        if self._failed is not None:
            self._failed.loaded = True
        return dict(found.extra)

    @property
    def is_first(self) -> bool:
        """True in the process that writes for all: that of rank 0."""
        return 0 in self.world.ranks

    @property
    def exchange(self) -> Callable[[str], list[str]] | None:
        """Gives the texts of all processes, given this one's, which all must call; None where it is the only one."""
        return self._exchange if self._setting.several else None

    @one_at_a_time
    def _exchange(self, text: str) -> list[str]:
        self._enter("exchange")
        return told(self.world, "texts", lambda: text)

    def rows(self, size: int) -> list[int]:
        """The rows of a batch of so many that the ranks of this process take, in order; all where it has all ranks.

        All, too, where `weft.Buckets` pads batches: how far, the longest row of all says.
        """
        if self._setting.buckets is not None:
            return list(range(size))
        return self._variants.rows(size)

    def _state(self) -> ProgramState:
        return ProgramState(self._setting, self.graph, self._training)

    def explain(self, details: bool = False, op: str | None = None) -> str:
        """Describe the program in some 25 lines: what a step takes, what its ranks send and hold, what limits it.

        The step's time, and that of every boxing, stand as `predicted` and as the first rank of this process measured
        them in the last step. Other times are estimates from shapes; bytes and memory are those of the plan.

        Args:
            details: all tables: inputs, layouts, every boxing with its bytes and cause, buckets,
                memory of each rank, the schedule, kernels.
            op: a pattern of modules ("blocks.0", which stands for what is below it, too),
                lines ("model.py:30"), ops ("aten.mm.*") or names of parameters and leaves of the
                batch: the rows of these tables that match.

        Raises:
            UserError: when nothing matches `op`.
        """
        if op is not None:
            return details_of(self._compiled, op, self._box_times())
        options = self._setting.options
        if not details:
            step = step_line(self.predicted, self._record()[1], self._waited)
            return explain(self._compiled, options, self.memory(), step)
        parts = (part for executor in self._executors.values() for part in executor.distinct_parts)
        text = tables(self._compiled, self.memory(), self._box_times()) + kernel_text(parts)
        if options.costs is not None:
            text += f"planned by {costs_text(options.costs)}\n"
        return text + replay_text(each.replayer for each in self._executors.values())

    def _record(self) -> tuple[int, Record]:
        """The first rank of this process, and what it recorded of the last step."""
        rank, executor = next(iter(self._executors.items()))
        return rank, executor.recorder.record()

    def _box_times(self) -> BoxTimes:
        rank, record = self._record()
        plan = next(plan for plan in self._compiled.plan.ranks if plan.rank == rank)
        return box_times(self._compiled, plan, self.predicted, record)

    def memory(self) -> ProgramMemory:
        """The peak of each rank of this process by kind: as the plan says it, and as measured in the first step."""
        measured = {rank: executor.measured for rank, executor in self._executors.items()}
        return program_memory(self._compiled.peaks, measured)

    @one_at_a_time
    def trace(self, path: str | Path | None = None, predicted: bool = False) -> Trace:
        """The times of every act of the last step, on all ranks, and the waits of their queues.

        It says which batch that step was planned for. Every process must call it. After `recording`,
        the trace holds all steps of it until the next step begins.

        Args:
            path: where the first rank writes it, for ui.perfetto.dev or chrome://tracing; a row for
                each queue of each rank.
            predicted: write the predicted step beside it, of the ranks that stand for all: in processes of their own,
                "measured rank 0" and "predicted rank 0", which begin at the same time.

        Raises:
            UserError: when there was no step yet.
            RankFailure: when another process does not call it before the world's time-out.
        """
        self._enter("trace")
        world = self.world
        records = {rank: executor.recorder.record() for rank, executor in self._executors.items()}
        trace = gather_trace(world, self._compiled, records)
        trace = replace(trace, batch=self._variants.current.name)
        if path is not None and 0 in world.ranks:
            trace.write(path, self.predicted.traces if predicted else ())
        return trace

    @one_at_a_time
    def report(self, path: str | Path) -> None:
        """Write a page that shows layouts of the model, and time and memory of the last step and of the predicted one.

        One HTML file, which opens from disk without a network. Every process must call it, after a step; the first
        writes. After `recording`, it shows all steps of it.

        Args:
            path: of the file.

        Raises:
            UserError: when there was no step yet, or it cannot be written.
        """
        trace = self.trace()
        if self.is_first:
            notes = self.explain().splitlines()
            shown = Report(
                *(title(self.graph), self._compiled, self.predicted, trace.ranks),
                notes=notes,
                strategy=self.strategy,
            )
            write_report(path, shown)

    @contextmanager
    def recording(self, path: str | Path | None = None) -> Iterator[None]:
        """Trace all steps made inside, and write them at the end as `trace` does.

        Every process must enter it, and make the same steps. When a step fails nothing is written. Of
        steps of several plans, as for other shapes, those are left out that ran not by the plan of the
        last one, which the log "weft" says.
        """
        before = self._steps
        recorders = [executor.recorder for executor in self._executors.values()]
        for recorder in recorders:
            recorder.clear()
            recorder.keeping = True
        try:
            yield
        finally:
            for recorder in recorders:
                recorder.keeping = False
        shown, made = len(self.trace(path).ranks[0].steps), self._steps - before
        if shown < made:
            _log.warning(
                "the trace holds %d of the %d steps that were recorded, those on %s; the others ran by other plans",
                *(shown, made, self._variants.current.name),
            )

    @one_at_a_time
    def close(self) -> None:
        """End the threads of this program. It cannot step afterwards; other programs keep its variables."""
        self._close()
        let_go(self._setting.model, self)
        snapshots, self._snapshots = self._snapshots, {}
        for each in snapshots.values():
            each.close()
        self._written()


def _constants_of(variants: Variants, training: Training | None) -> Iterator[Tensor]:
    """Tensors of elsewhere that the plans of a program read."""
    yield from variants.constants()
    if training is not None:
        yield from training.constants()


def _close_all(variants: Variants, training: Training | None) -> None:
    try:
        variants.setting.world.check_process()
    except (
        UserError
    ):  # threads and connections are those of the process that this one was forked from
        return
    variants.close()
    if training is not None:
        training.close(but=variants)


def checkpoint_path(path: object) -> Path:
    """A path that a user gave for a checkpoint, from the root."""
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"a checkpoint is a folder; give its path as text, found {path!r}")
    if "\0" in str(path) or not str(path).isprintable():
        raise UserError(f"a path of a checkpoint takes printable characters, found {str(path)!r}")
    return Path(path).expanduser().absolute()
