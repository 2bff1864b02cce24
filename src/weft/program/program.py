"""Program: a compiled training or evaluation step, ready to run on the ranks of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture import Captured, capture
from weft.compiler.deduce import Hints
from weft.compiler.pipeline import Compiled, compile_graph
from weft.errors import UserError
from weft.ir import LogicalGraph, Plan
from weft.ir.logical import Input, Output, Ref
from weft.layout import Layout, Placement
from weft.program.explain import explain
from weft.program.shards import BatchShard, local_part, shard_part, without_shards
from weft.runtime import Executor, State, World


@dataclass(frozen=True)
class Setting:
    """What all programs of one model share.

    Attributes:
        model: the user's model; never changed.
        world: the ranks of this process.
        placement: where everything lies.
        states: each rank's variables, by key.
        seed: of the random ops.
    """

    model: nn.Module
    world: World
    placement: Placement
    states: Mapping[int, State]
    seed: int


class Program:
    """One step of training or evaluation, compiled. Made by `weft.compile` and `Program.evaluation`."""

    def __init__(
        self,
        setting: Setting,
        captured: Captured,
        compiled: Compiled,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._setting = setting
        self._captured = captured
        self._compiled = compiled
        self._optimizer = optimizer
        self._executors = _executors(setting, captured, compiled, optimizer)

    @property
    def plan(self) -> Plan:
        """Actors and registers of the ranks of this process; prints as text."""
        return self._compiled.plan

    @property
    def graph(self) -> LogicalGraph:
        """The captured step with the layouts of all values and boxing between them; prints as text."""
        return self._compiled.graph

    def step(self, batch: Any) -> Any:
        """Run one step on every rank of this process.

        Args:
            batch: built like the example batch. Plain tensors are the whole batch, the same on all ranks; each rank
                takes its part. A leaf made by `weft.from_local` is only this rank's part.

        Returns:
            What the loss function returned when it was captured, with whole tensors in it.

        Raises:
            BatchError: when the batch differs from the example.
            RankFailure: when a rank failed; the first error is the cause.
        """
        whole, shards = without_shards(batch)
        leaves = self._captured.batch.flatten_batch(whole)
        layouts = {n.key: n.value.layout for n in self.graph.of_kind(Input) if n.role == "batch"}
        feeds = {
            rank: self._feed(leaves, shards, layouts, rank) for rank in self._executors
        }
        results = self._setting.world.run(lambda rank: self._executors[rank].step(feeds[rank]))
        return self._captured.unflatten_outputs(results[0])

    def evaluation(self, function: Callable[[nn.Module, Any], Any], example_batch: Any) -> Program:
        """A program that calls `function(model, batch)` with this program's live parameters and buffers.

        The model is in eval mode. `step` of the new program returns what `function` returns, with whole tensors.
        """
        setting = self._setting
        batch, _ = without_shards(example_batch)
        captured = capture(
            setting.model, function, None, batch, setting.placement.device_type, training=False
        )
        hints = _as_they_lie(self.graph)
        ranks = setting.world.ranks
        compiled = compile_graph(captured.graph, hints, setting.placement, ranks)
        return Program(setting, captured, compiled)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole copies of all parameters and buffers, under the names of the model's `state_dict()`.

        All ranks must call it. The values are on the placement's device, the same on every rank.
        """
        program = _gathering_program(self._setting, self.graph)
        whole = program.gather()
        program.close()
        names = tied_names(self._setting.model)
        return {name: whole[key] for name, key in names.items()}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from whole tensors, as `full_state_dict` gives them.

        Raises:
            UserError: naming the entries that are missing, unknown, or of another shape.
        """

    def explain(self) -> str:
        """Tables: inputs, layouts, every boxing with its bytes and cause, memory of each rank."""
        return explain(self._compiled)

    def close(self) -> None:
        """End the threads of this program. It cannot step afterwards; its variables stay with other programs."""
        for executor in self._executors.values():
            executor.close()
