"""`weft.compile`: from an ordinary PyTorch model to a program that trains on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from weft.capture.optimizers import Optimizing
from weft.compiler.options import METRICS, Metric, Options
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages import stage_placements
from weft.errors import StrategyError, UserError
from weft.layout import Placement
from weft.program.buckets import Buckets
from weft.program.build import Setting, local_ranks, with_leaves, with_lying
from weft.program.collector import uncollected
from weft.program.everyone import agreed_seed
from weft.program.gradients import Gradients
from weft.program.hints import split_parameters, strategy_hints
from weft.program.live import Lying, lying, take_over
from weft.program.local_batch import LocalBatch
from weft.program.masters import Masters
from weft.program.program import Program
from weft.program.progress import progress
from weft.program.states import States
from weft.program.step import Step
from weft.program.strategy import Strategy, data_parallel
from weft.program.training import Training
from weft.program.variables import add_loss_scale, add_masters
from weft.program.variants import Planned, Variants, check_lying, lying_in
from weft.program.verification import check_values
from weft.runtime.allocator import give_back
from weft.runtime.distributed import current_world
from weft.runtime.kernel_choice import Kernels, usable_kernels


@uncollected()
def compile(
    model: nn.Module | Step,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: Optimizing = None,
    example_batch: Any = None,
    *,
    placement: Placement,
    strategy: Strategy | None = None,
    seed: int | None = None,
    kernels: Kernels = "aten",
    batch: Literal["whole", "local"] = "whole",
    metrics: Sequence[Metric] = (),
    shapes: Buckets | None = None,
    verify: bool = False,
) -> Program:
    """Compile one training step of an ordinary single-device model for many ranks.

    The result of every step is that of the single-device program, up to the order of floating-point
    sums, whatever the strategy. Random ops draw by global position from `seed`, so they do not
    depend on the layout either.

    Args:
        model: any module, which the program takes over, as `fully_shard` does: its parameters and
            buffers are from now on the variables of the program, as `weft.GlobalTensor`s in the
            layout in which each is stored (ordinary tensors where there is one rank). They are the
            same objects, under the same names, and the optimizer's; what is written to them the
            next step sees, and eager code may use them. May be on the meta device when its modules
            have `reset_parameters()`. A model whose parameters an open program holds already is
            shared; `weft.release` gives it back. Or a `weft.Step`, which holds this and the next
            three and is captured once for all strategies.
        loss_fn: `loss_fn(model, batch)` returns the loss, or a tuple or dict with it (see
            `weft.capture.capture`).
        optimizer: a `torch.optim` optimizer of the model's parameters, or a list of several, which
            share none, such as Muon for matrices and AdamW for the rest: each updates its own in
            every step, and gradients are clipped and measured all together. Hyperparameters are
            read before every step, so schedulers work; states become global tensors, too. None
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
        metrics: what `Program.metrics` holds after each step that updates: "grad_norm", the norm of
            all gradients together before they are clipped.
        shapes: lengths that batches are padded to; without, the step is planned for each shape that
            comes.
        verify: run `Program.verify` with the example batch, which then needs values.

    Raises:
        CaptureError: the step cannot be one graph; names the user's line. A parameter is in two
            optimizers.
        StrategyError: a name pattern of the strategy matches nothing, or stages do not fit.
        LayoutError: a layout does not fit a tensor, or the placement does not fit the world.
        RuleError: an op has no sharding rule.
        VerificationError: with `verify`, a plain eager step gives something else; names it and the line.
        UserError: an open program holds the model's parameters in other layouts; a graph of autograd
            needs their values; or `kernels` is "inductor" and there is no compiler for it; or others
            may write to the folder where compiled code is kept.
    """
    strategy = data_parallel() if strategy is None else strategy
    _check_arguments(strategy, batch, metrics)
    given = model.example_batch if isinstance(model, Step) else example_batch
    if verify:
        check_values(given)
    kernels = usable_kernels(kernels, placement.device_type)
    world = current_world(placement.device_type)
    world.calls.enter("compile")
    ranks = local_ranks(world, placement)
    local = LocalBatch(strategy, placement, world) if batch == "local" else None
    if shapes is not None and isinstance(model, Step):
        model = model.of_shape(shapes.padded(given))
    example = example_batch if shapes is None or isinstance(model, Step) else shapes.padded(given)
    step = _step(model, loss_fn, optimizer, local.whole(example) if local else example)
    modules = tuple(path for path, _ in step.model.named_modules(remove_duplicate=False) if path)
    options = replace(
        strategy.options(), modules=modules, device=world.links(), metrics=tuple(metrics)
    )
    planner = _Planner(strategy, placement, ranks, options, lying(step.model))
    with progress(0 in ranks) as begin:
        first = planner.plan(step, begin)
        graph, stored = first[1].graph, first[1].stored
        begin("filling variables")
        variables = take_over(step.model, graph, stored, world, placement)
        seed = agreed_seed(torch.initial_seed() if seed is None else seed, world)
        setting = Setting(
            step.model, world, placement, options, variables, seed, kernels, local, shapes
        )
        add_loss_scale(setting, graph)
        add_masters(setting, graph)
        begin("starting the ranks")
        training = None
        if step.optimizers:
            states = [
                States(step.optimizers, one, step.model, variables) for one in step.optimizers.each
            ]
            training = Training(states, Gradients(setting, step.optimizers), Masters(variables))
        every = planner.variants(setting, step, first, training)
        if training is not None:
            training.holds(lambda: planner.holding(setting, step, first[1], training) or every)
        program = Program(every, step, training)
        give_back()
    if verify:
        _verify(program, given)
    return program


def _check_arguments(strategy: object, batch: object, metrics: Sequence[object]) -> None:
    if not isinstance(strategy, Strategy):
        raise StrategyError(f"strategy= takes a weft.Strategy, found {strategy!r}")
    if batch not in ("whole", "local"):
        raise UserError(f'batch= takes "whole" or "local", found {batch!r}')
    for name in metrics:
        if name not in METRICS:
            raise UserError(f"metrics= takes names among {list(METRICS)}, found {name!r}")


def _verify(program: Program, batch: Any) -> None:
    """Verify a program, which is closed when it fails."""
    try:
        program.verify(batch)
    except BaseException:
        program.close()
        raise


@dataclass(frozen=True)
class _Planner:
    """What plans of one program have in common."""

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
        held = lying_in(like) if like else self.held
        homes = like.stages.homes if like else held.homes(placements)
        hints = with_lying(hints, held, graph)
        compiled = compile_graph(graph, hints, self.placement, ranks, options, homes, begin)
        check_lying(compiled, self.held, "another program that is open")
        return captured, compiled

    def variants(
        self, setting: Setting, step: Step, first: Planned, training: Training | None
    ) -> Variants:
        """The step for all batches, beginning with `first`, as which variables lie."""
        return Variants(
            setting,
            first,
            step.optimizers,
            lambda batch: self.plan(step.of_shape(batch), like=first[1]),
            training.know if training else lambda _: None,
        )

    def holding(
        self, setting: Setting, step: Step, like: Compiled, training: Training
    ) -> Variants | None:
        """The same without what belongs to an update, clipping and its norm; None where that is the same step."""
        bare = replace(self, options=replace(self.options, clip_norm=None, metrics=()))
        if bare == self:
            return None
        return bare.variants(setting, step, bare.plan(step.now(), like=like), training)


def _step(
    model: nn.Module | Step,
    loss_fn: Callable[[nn.Module, Any], Any] | None,
    optimizer: Optimizing,
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
