"""Program: a compiled training or evaluation step, ready to run on the ranks of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.ir import LogicalGraph, Plan
from weft.layout import Placement
from weft.planning.stored_step import StoredStep
from weft.program.everyone import told
from weft.program.explain.memory import ProgramMemory
from weft.program.live.holds import hold, let_go, reads
from weft.program.one_thread import lock_of, one_at_a_time
from weft.program.parts.core import ProgramCore, constants_of
from weft.program.parts.evaluation import evaluation_of
from weft.program.parts.inspection import ProgramInspection
from weft.program.parts.saving import ProgramSaving
from weft.program.parts.stepping import ProgramSteps, steps_of
from weft.program.parts.whole_state import WholeState
from weft.program.planning.step import Step
from weft.program.planning.variants import Variants
from weft.program.saving.claims import claim, give_up
from weft.program.saving.paths import checkpoint_path
from weft.program.saving.weights import Weights
from weft.program.trace import Trace
from weft.program.training.training import Training
from weft.program.verification import Verified
from weft.runtime.executor.device_executor import DeviceExecutor
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.world.world import World
from weft.simulator.results.simulation import Simulation
from weft.strategy.strategy import Strategy


@final
class Program:
    """One step of training or evaluation, compiled. Made by `weft.compile` and `Program.evaluation`."""

    def __init__(self, variants: Variants, step: Step, training: Training | None = None) -> None:
        self._variants = variants
        self._setting = variants.setting
        self._step = step
        self._training = training
        self._core = ProgramCore(variants, step, training)
        self.working = lock_of(self.world)
        hold(self._setting.model, self)
        reads(self, lambda: constants_of(variants, training))
        self._stepping = ProgramSteps(self._core)
        self._whole = WholeState(self._core)
        self._saving = ProgramSaving(self._core)
        self._inspection = ProgramInspection(self._core)

    def __repr__(self) -> str:
        return f"<weft.Program: {self._inspection.line()}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "a program cannot be copied or pickled: it works on this process's ranks. program.save(path) keeps a run; "
            "compile the model once more for another program"
        )

    def _repr_html_(self) -> str:
        """A short form of `explain`, which notebooks show; it simulates nothing and asks no other process."""
        return self._inspection.html()

    @property
    def world(self) -> World:
        """The ranks of this process."""
        return self._setting.world

    @property
    def _compiled(self) -> Compiled:
        return self._core.compiled

    @property
    def _executors(self) -> Mapping[int, ThreadExecutor | DeviceExecutor]:
        return self._core.executors

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
    def is_open(self) -> bool:
        """True until `close`."""
        return self._core.is_open

    @property
    def steps(self) -> int:
        """The number of steps that were made, those before a checkpoint that was loaded included."""
        return self._core.steps

    @property
    def placement(self) -> Placement:
        """All its ranks."""
        return self._setting.placement

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """The metrics that `metrics=` of `weft.compile` asks for, of the last step; empty before it."""
        return self._core.metrics

    @property
    def predicted(self) -> Simulation:
        """A step of the current plan on this machine, simulated when it is first asked for.

        Its costs are those that `weft measure` has found here for as many ranks, processes and threads. Where it found
        none, and for calls that it did not meet, they are estimates, and `estimates` of the result says so.
        """
        return self._inspection.predicted

    def stored(self, device_type: str = "cpu", strategy: Strategy | None = None) -> StoredStep:
        """The captured step, for plans on other machines: as `weft.Job.stored` gives it."""
        return self._step.now().stored(device_type, strategy)

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
        return self._stepping.step(batch, update)

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
        return steps_of(self._core, self.step, batches, ahead)

    @one_at_a_time
    def update(self) -> None:
        """Update the parameters by what is in their `grad`, clipped as the strategy says; it is None afterwards.

        Parameters whose `grad` is None stay as they are. The gradients are those of steps with
        `update=False`, or of any loss of the live model whose `backward()` was called.

        Raises:
            UserError: when there is no gradient, or the program does not train, or was closed.
            RankFailure: when a rank failed; the first error is the cause.
        """
        self._stepping.update()

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
        return self._stepping.verify(batch)

    @one_at_a_time
    def evaluation(self, function: Callable[[nn.Module, Any], Any], example_batch: Any) -> Program:
        """A program that calls `function(model, batch)` with this program's live parameters and buffers.

        The model is in eval mode. `step` of the new program returns what `function` returns, with
        whole tensors.
        """
        return Program(*evaluation_of(self._core, function, example_batch))

    @one_at_a_time
    def full_state_dict(self, masters: bool = False) -> dict[str, Tensor]:
        """Whole copies of all parameters and buffers, under the names of the model's `state_dict()`.

        Every process must call it. The tensors are on the placement's device, the same on every
        rank.

        Args:
            masters: give the float32 master of each parameter that has one, in place of what it is
                when rounded, so that `load_full_state_dict` goes on exactly there.
        """
        return self._whole.of_model(masters)

    @one_at_a_time
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from whole tensors, as `full_state_dict` gives them.

        Masters take the values as they are given, parameters what they are when rounded.

        Raises:
            UserError: naming the entries that are missing, unknown, or of another shape.
        """
        self._whole.load_model(state)

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
        return self._whole.of_optimizer(optimizer)

    @one_at_a_time
    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        replace: bool = False,
    ) -> None:
        """Write a checkpoint: parameters, buffers, optimizer states, masters, loss scale, options of groups, steps.

        And what modules give by `get_extra_state()`.

        It is a folder of safetensors files, as `torch.distributed.checkpoint` writes them, in which each tensor
        stands once, under the names that a single device has ("model.blocks.0.weight",
        "optimizer.state.blocks.0.weight.exp_avg"), and "weft.json" with all that is no tensor. It appears at `path`
        whole or not at all. Every process must call it.

        Args:
            path: on a file system that all processes see.
            extra: more that `load` gives back: numbers, texts, tensors, lists and dicts of them, and objects with
                `state_dict` and `load_state_dict` such as learning-rate schedulers. Where they differ between
                processes, each keeps its own; global tensors in them must be the same on all.
            wait: False goes on as soon as all is copied to host memory; a thread writes meanwhile. The next `save`,
                `load`, `wait_for_saved` and `close` wait for it, and raise what has failed.
            replace: True puts it in the place of what is at `path`, once it is whole; else nothing may be there.

        Raises:
            UserError: on every process, when one cannot write; gradients wait for an update; or `extra` holds something
                else.
        """
        self._saving.save(path, extra, wait, replace)

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
        claim(checkpoint_path(path), self)
        self._saving.save_in_memory(path, extra)

    @one_at_a_time
    def wait_for_memory(self) -> None:
        """Wait until the last snapshot is whole, here and on the other hosts. Every process may call it, or none."""
        self._saving.wait_for_memory()

    @one_at_a_time
    def saved_in_memory(self, path: str | Path) -> list[int]:
        """The steps of the snapshots that count, the newest last. Every process must call it.

        Args:
            path: the folder of the checkpoints that they belong to.

        Raises:
            UserError: on every process, when there is no folder for snapshots.
        """
        return self._saving.saved_in_memory(path)

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
        return self._saving.load_from_memory(path, step, extra)

    @one_at_a_time
    def wait_for_saved(self) -> None:
        """Wait until a checkpoint that `save` still writes is there. Every process must call it.

        Raises:
            UserError: on every process, when one could not write.
        """
        self._saving.wait_for_saved()

    @one_at_a_time
    def load(
        self,
        path: str | Path | Weights,
        extra: Mapping[str, Any] | None = None,
        model_only: bool = False,
    ) -> dict[str, Any]:
        """Go on from a checkpoint that `save` wrote, in any layout, on any number of ranks.

        Files that `torch.distributed.checkpoint` has written as safetensors are read too, with names as `save` gives
        them or the plain ones of a model's `state_dict()`; states that they lack begin anew, or stay. Each rank reads
        what it holds. Every process must call it.

        Args:
            path: the folder; or a `weft.Weights` of parameters and buffers alone, under other names, or not all there.
            extra: objects whose `load_state_dict` gets what `save` had under the same name; where they hold global
                tensors, in the layouts of those.
            model_only: True reads parameters and buffers, and leaves optimizers, steps and extras as they are.

        Returns:
            What `save` was given as `extra`, by this process where they differ.

        Raises:
            UserError: on every process, before anything is written: there is no checkpoint, a file is damaged or
                missing, it is of another model, optimizer or seed, or extras differ and were saved by another number
                of processes.
        """
        return self._saving.load(path, extra, model_only)

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
        self._core.enter("exchange")
        return told(self.world, "texts", lambda: text)

    def rows(self, size: int) -> list[int]:
        """The rows of a batch of so many that the ranks of this process take, in order; all where it has all ranks.

        All, too, where `weft.Buckets` pads batches: how far, the longest row of all says.
        """
        if self._setting.buckets is not None:
            return list(range(size))
        return self._variants.rows(size)

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
        return self._inspection.explain(details, op)

    def memory(self) -> ProgramMemory:
        """The peak of each rank of this process by kind: as the plan says it, and as measured in the first step.

        Steps of `verify` do not count.
        """
        return self._inspection.memory()

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
            UserError: when there was no step yet, or it cannot be written.
            RankFailure: when another process does not call it before the world's time-out.
        """
        return self._inspection.trace(path, predicted)

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
        self._inspection.report(path)

    def recording(self, path: str | Path | None = None) -> AbstractContextManager[None]:
        """Trace all steps made inside, and write them at the end as `trace` does.

        Every process must enter it, and make the same steps. When a step fails nothing is written. Of
        steps of several plans, as for other shapes, those are left out that ran not by the plan of the
        last one, which the log "weft" says.
        """
        return self._inspection.recording(path, self.trace)

    @one_at_a_time
    def close(self) -> None:
        """End the threads of this program. It cannot step afterwards; other programs keep its variables."""
        self._core.close()
        let_go(self._setting.model, self)
        self._saving.close()
        give_up(self)
