"""`weft.compile`: from an ordinary PyTorch model to a program that trains on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from weft.compiler.options import Options
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages import stage_placements
from weft.errors import StrategyError, UserError
from weft.layout import Placement
from weft.program.build import Setting, local_ranks, with_leaves, with_variables
from weft.program.collector import uncollected
from weft.program.hints import split_parameters, strategy_hints
from weft.program.local_batch import LocalBatch
from weft.program.program import Program
from weft.program.progress import progress
from weft.program.step import Step
from weft.program.strategy import Strategy, data_parallel
from weft.program.variables import (
    add_loss_scale,
    add_masters,
    add_optimizer_states,
    agreed_seed,
    initial_variables,
)
from weft.program.variants import Planned, Variants
from weft.runtime.distributed import current_world
from weft.runtime.kernel_choice import Kernels, usable_kernels


@uncollected()
def compile(
    model: nn.Module | Step,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    example_batch: Any = None,
    *,
    placement: Placement,
    strategy: Strategy | None = None,
    seed: int | None = None,
    kernels: Kernels = "aten",
    batch: Literal["whole", "local"] = "whole",
) -> Program:
    """Compile one training step of an ordinary single-device model for many ranks.

    The result of every step is that of the single-device program, up to the order of floating-point
    sums, whatever the strategy. Random ops draw by global position from `seed`, so they do not
    depend on the layout either.

    Args:
        model: any module; parameters and buffers are copied, the model itself stays as it is. May
            be on the meta device when its modules have `reset_parameters()`. Or a `weft.Step`, which
            holds this and the next three and is captured once for all strategies.
        loss_fn: `loss_fn(model, batch)` returns the loss, or a tuple or dict with it (see
            `weft.capture.capture`).
        optimizer: a `torch.optim` optimizer of the model's parameters. Its hyperparameters are read
            before every step, so schedulers work; states that it has already are taken over. None
            compiles an evaluation step: no backward, the model in eval mode.
        example_batch: nest of tensors of the whole batch's shapes and dtypes; its values are not
            used.
        placement: the ranks to run on, those of all stages; inside `weft.local_world` or under
            torchrun.
        strategy: what the user fixes; everything else is deduced. By default data parallel.
        seed: of the random ops; by default torch's initial seed on the first rank.
        kernels: how local work runs: "aten" as calls of torch's ops, which is quick to compile;
            "inductor" compiled by torch's Inductor, each distinct layer once; "auto" measures both
            for each distinct layer and takes the faster. What was compiled and measured is kept in
            the folder `WEFT_CACHE` (by default `~/.cache/weft`), which nobody else may write to.
            On CUDA, segments are replayed as CUDA graphs where launching takes longer than
            computing; the variable `WEFT_CUDA_GRAPHS` ("auto", "always" or "never") says otherwise.
        batch: "whole": what every process passes to `step` is the whole batch, the same on all; a
            difference is an error. "local": each process passes its own rows, as with a
            `DistributedSampler`, all as many; the layouts of leaves say which axes split them.

    Raises:
        CaptureError: the step cannot be one graph; names the user's line.
        StrategyError: a name pattern of the strategy matches nothing, or stages do not fit.
        LayoutError: a layout does not fit a tensor, or the placement does not fit the world.
        RuleError: an op has no sharding rule.
        UserError: the model was changed by `weft.distribute`; or `kernels` is "inductor" and there is
            no compiler for it; or others may write to the folder where compiled code is kept.
    """
    strategy = data_parallel() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        raise StrategyError(f"strategy= takes a weft.Strategy, found {strategy!r}")
    if batch not in ("whole", "local"):
        raise UserError(f'batch= takes "whole" or "local", found {batch!r}')
    kernels = usable_kernels(kernels, placement.device_type)
    world = current_world(placement.device_type)
    world.calls.enter("compile")
    ranks = local_ranks(world, placement)
    local = LocalBatch(strategy, placement, world) if batch == "local" else None
    step = _step(model, loss_fn, optimizer, local.whole(example_batch) if local else example_batch)
    modules = tuple(path for path, _ in step.model.named_modules(remove_duplicate=False) if path)
    options = replace(strategy.options(), modules=modules, device=world.links())
    planner = _Planner(strategy, placement, ranks, options)
    with progress(0 in ranks) as begin:
        first = planner.plan(step, begin)
        begin("filling variables")
        variables = initial_variables(step.model, first[1].graph, world, ranks)
        seed = agreed_seed(torch.initial_seed() if seed is None else seed, world)
        setting = Setting(step.model, world, placement, options, variables, seed, kernels, local)
        add_optimizer_states(setting, first[1].graph, step.optimizer)
        add_loss_scale(setting, first[1].graph)
        add_masters(setting, first[1].graph)
        begin("starting the ranks")
        return Program(
            Variants(
                setting,
                first,
                step.optimizer,
                lambda batch: planner.plan(step.of_shape(batch), like=first[1]),
            )
        )


@dataclass(frozen=True)
class _Planner:
    """What plans of one program have in common."""

    strategy: Strategy
    placement: Placement
    ranks: tuple[int, ...]
    options: Options

    def plan(
        self,
        step: Step,
        begin: Callable[[str], None] = lambda _: None,
        like: Compiled | None = None,
    ) -> Planned:
        """Capture a step, and compile it.

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
        homes = like.stages.homes if like else None
        if like is not None:
            hints = with_variables(hints, like)
        return captured, compile_graph(graph, hints, self.placement, ranks, options, homes, begin)


def _step(
    model: nn.Module | Step,
    loss_fn: Callable[[nn.Module, Any], Any] | None,
    optimizer: torch.optim.Optimizer | None,
    example_batch: Any,
) -> Step:
    """The step that the arguments of `compile` stand for."""
    if not isinstance(model, Step):
        if loss_fn is None:
            raise UserError("weft.compile takes a model, loss_fn, optimizer and example_batch")
        return Step(model, loss_fn, optimizer, example_batch)
    if any(each is not None for each in (loss_fn, optimizer, example_batch)):
        raise UserError(
            "weft.compile of a weft.Step takes no loss_fn, optimizer or example_batch: the step has them"
        )
    return model
