"""Program: a compiled training or evaluation step, ready to run on the ranks of this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.hardware import links_text
from weft.ir import LogicalGraph, Plan
from weft.ir.logical import Input, Update
from weft.program.agreement import OptionsChecksum
from weft.program.build import build, evaluation, gathering
from weft.program.explain import explain
from weft.program.held import check_held
from weft.program.kernel_table import kernel_text
from weft.program.memory import ProgramMemory, program_memory
from weft.program.replay_table import replay_text
from weft.program.trace import Trace, gather_trace
from weft.program.variables import load_whole, state_dict_names
from weft.program.variants import Planned, Variants
from weft.runtime.device_executor import DeviceExecutor
from weft.runtime.executor import Executor
from weft.runtime.stamps import Stamp


class Program:
    """One step of training or evaluation, compiled. Made by `weft.compile` and `Program.evaluation`."""

    def __init__(self, variants: Variants) -> None:
        self._variants = variants
        self._setting = variants.setting
        self._options = OptionsChecksum(variants.optimizer)
        self._number = self._setting.world.calls.new_program()
        self._steps = self._chain = 0
        # Threads and groups end with the program also when nobody closes it.
        self._close = weakref.finalize(self, self._variants.close)

    def __repr__(self) -> str:
        graph = self.graph
        rules = dict.fromkeys(each.rule for each in graph.of_kind(Update) if each.rule != "copy")
        kind = f"training step by {', '.join(rules)}" if rules else "evaluation"
        leaves = (
            f"{node.key} {node.value.dtype}{list(node.value.shape)}"
            for node in graph.of_kind(Input)
            if node.role == "batch"
        )
        where = ", ".join(map(str, graph.placements))
        made = "closed" if not self._close.alive else f"{self._steps} steps made"
        return f"<weft.Program: {graph.name}, {kind} on {where}; batch {', '.join(leaves)}; {made}>"

    def _enter_step(self, shapes: str) -> None:
        self._chain = self._enter(f"step {self._steps} on {shapes}")

    def _enter(self, what: str) -> int:
        """A call begins that all ranks must make."""
        return self._setting.world.calls.enter(f"{what} of program {self._number}")

    @property
    def _compiled(self) -> Compiled:
        return self._variants.current.compiled

    @property
    def _executors(self) -> Mapping[int, Executor | DeviceExecutor]:
        return self._variants.current.executors

    @property
    def plan(self) -> Plan:
        """Actors and registers of the ranks of this process; prints as text."""
        return self._compiled.plan

    @property
    def graph(self) -> LogicalGraph:
        """The captured step with the layouts of all values and the boxing between them; prints as text."""
        return self._compiled.graph

    def step(self, batch: Any, update: bool = True) -> Any:
        """Run one step on every rank of this process.

        Args:
            batch: built like the example batch; tensors may have other shapes, for which the step is
                planned when they first come, in some seconds. Plain tensors are the whole batch, the
                same on all ranks; each rank takes its part. A leaf that is a global tensor, as
                `weft.from_local` makes, lies there already; with micro-batches it is brought there,
                as each of them is a run of samples of the whole batch.
            update: False updates no parameter; the gradients are kept, in the layouts of the
                parameters, and added to those of the next step, as when `loss.backward()` is called
                several times before `optimizer.step()`. Buffers are written in every step.

        Returns:
            What the loss function returned when it was captured, with whole tensors in it.

        Raises:
            BatchError: when the batch differs from the example in more than shapes.
            UserError: when the program was closed. When something that the step was captured with
                has changed: a number, flag or text that the model reads, which parameters are
                trained, the optimizer's groups. When
                gradients cannot be kept: there are none, or they are clipped or skipped in every
                step.
            RankFailure: when a rank failed; the first error is the cause.
        """
        if not self._close.alive:
            raise UserError("this program was closed, and cannot step; compile another one")
        if not update:
            check_held(self.graph)
        if self._setting.local is not None:
            batch = self._setting.local.whole(batch)
        feeds, checksum = self._variants.feeds(batch, self._steps, self._enter_step)
        self._variants.current.guards.check()
        stamp = 0
        if self._setting.several:
            stamp = int(Stamp(checksum, self._options.of(update), self._chain))
        results = self._variants.current.step(self._setting, self._steps, feeds, update, stamp)
        self._steps += 1
        return results

    def evaluation(self, function: Callable[[nn.Module, Any], Any], example_batch: Any) -> Program:
        """A program that calls `function(model, batch)` with this program's live parameters and buffers.

        The model is in eval mode. `step` of the new program returns what `function` returns, with
        whole tensors.
        """
        self._enter("evaluation")
        setting, trained = self._setting, self._compiled

        def plan(batch: Any) -> Planned:
            return evaluation(setting, trained, function, batch)

        local = setting.local
        first = example_batch if local is None else local.whole(example_batch)
        return Program(Variants(setting, plan(first), None, plan))

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
        executors = build(self._setting, {}, compiled, None)
        whole = self._setting.run(lambda rank: executors[rank].step({}))
        for executor in executors.values():
            executor.close()
        names = state_dict_names(self._setting.model)
        return {name: whole[key] for name, key in names.items()}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from whole tensors, as `full_state_dict` gives them.

        Masters take the values as they are given, parameters what they are when rounded.

        Raises:
            UserError: naming the entries that are missing, unknown, or of another shape.
        """
        load_whole(self._setting, self.graph, state)

    def explain(self) -> str:
        """Tables: inputs, layouts, every boxing with its bytes and cause, memory of each rank."""
        parts = (part for executor in self._executors.values() for part in executor.parts)
        text = explain(self._compiled, self.memory()) + kernel_text(parts)
        if self._setting.options.device is not None:
            text += f"links as measured: {links_text(self._setting.options.device)}\n"
        return text + replay_text(each.replayer for each in self._executors.values())

    def memory(self) -> ProgramMemory:
        """The peak of each rank of this process by kind: as the plan says it, and as measured in the first step."""
        measured = {rank: executor.measured for rank, executor in self._executors.items()}
        return program_memory(self._compiled.peaks, measured)

    def trace(self, path: str | Path | None = None) -> Trace:
        """When every act of the last step ran, on all ranks, and what queues waited for.

        Every process must call it. After `recording`, the trace holds all steps of it until the
        next step begins.

        Args:
            path: where the first rank writes it, for ui.perfetto.dev or chrome://tracing; a row for
                each queue of each rank.

        Raises:
            UserError: when there was no step yet.
            RankFailure: when another process does not call it before the world's time-out.
        """
        self._enter("trace")
        world = self._setting.world
        records = {rank: executor.recorder.record() for rank, executor in self._executors.items()}
        trace = gather_trace(world, self._compiled, records)
        if path is not None and 0 in world.ranks:
            trace.write(path)
        return trace

    @contextmanager
    def recording(self, path: str | Path | None = None) -> Iterator[None]:
        """Trace all steps made inside, and write them at the end as `trace` does.

        Every process must enter it, and make the same steps. When a step fails nothing is written.
        """
        recorders = [executor.recorder for executor in self._executors.values()]
        for recorder in recorders:
            recorder.clear()
            recorder.keeping = True
        try:
            yield
        finally:
            for recorder in recorders:
                recorder.keeping = False
        self.trace(path)

    def close(self) -> None:
        """End the threads of this program. It cannot step afterwards; other programs keep its variables."""
        self._close()
