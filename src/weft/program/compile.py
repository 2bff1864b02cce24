"""`weft.compile`: from an ordinary PyTorch model to a program that trains on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.compiler.pipeline import compile_graph
from weft.compiler.stages import stage_placements
from weft.errors import StrategyError, UserError
from weft.layout import Placement
from weft.program.build import Setting, local_ranks
from weft.program.collector import uncollected
from weft.program.hints import split_parameters, strategy_hints
from weft.program.program import Program
from weft.program.step import Step
from weft.program.strategy import Strategy, data_parallel
from weft.program.variables import (
    add_loss_scale,
    add_masters,
    add_optimizer_states,
    agreed_seed,
    initial_variables,
)
from weft.program.variants import Planned
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
    step = _step(model, loss_fn, optimizer, example_batch)
    kernels = usable_kernels(kernels, placement.device_type)
    world = current_world(placement.device_type)
    ranks = local_ranks(world, placement)
    modules = tuple(path for path, _ in step.model.named_modules(remove_duplicate=False) if path)
    options = replace(strategy.options(), modules=modules, device=world.links())
    placements = stage_placements(options.stages, placement)
    apart = split_parameters(strategy, dict(step.model.named_parameters()))
    captured = step.captured(placement.device_type, options.precision, apart)
    hints = strategy_hints(strategy, captured.graph, placements)
    compiled = compile_graph(captured.graph, hints, placement, ranks, options)
    variables = initial_variables(step.model, compiled.graph, world, ranks)
    seed = agreed_seed(torch.initial_seed() if seed is None else seed, world)
    setting = Setting(step.model, world, placement, options, variables, seed, kernels)
    add_optimizer_states(setting, compiled.graph, step.optimizer)
    add_loss_scale(setting, compiled.graph)
    add_masters(setting, compiled.graph)

    def plan(batch: Any) -> Planned:
        other = step.of_shape(batch).captured(placement.device_type, options.precision, apart)
        hints = strategy_hints(strategy, other.graph, placements)
        homes = compiled.stages.homes
        return other, compile_graph(other.graph, hints, placement, ranks, options, homes)

    return Program(setting, (captured, compiled), step.optimizer, plan)


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
