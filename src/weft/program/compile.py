"""`weft.compile`: from an ordinary PyTorch model to a program that trains on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, final

import torch
from torch import nn

from weft.cached import cached_property
from weft.capture.optimizer_groups import Optimizing
from weft.compiler.context import METRICS, Metric, options_of
from weft.errors import StrategyError, UserError, wrong
from weft.layout import Placement
from weft.planning.progress import progress, uncollected
from weft.program.agreement import check_alike, gathered, run_on_all
from weft.program.checkpoint.load import Weights, located, weights_in
from weft.program.core import at_work, check_modes, lock_of
from weft.program.data.whole_batch import Buckets, LocalBatch
from weft.program.live.live import take_over
from weft.program.live.ownership import live_shardings
from weft.program.live.variables import add_loss_scale, add_main_parameters
from weft.program.planning.auto import SPARE, Trials, choose_strategy, split_strategy_argument
from weft.program.planning.build import local_ranks
from weft.program.planning.step import Step, asked_of_step
from weft.program.planning.variants import Planned, Variants, planner_of
from weft.program.program import Program
from weft.program.setting import ProgramSetting
from weft.program.training.states import check_states
from weft.program.training.training import Training
from weft.program.verification import check_values
from weft.runtime.compiled.choice import UNCOMPILED, Kernels, usable_kernels
from weft.runtime.memory.heap import give_back
from weft.runtime.world.distributed import current_world
from weft.runtime.world.world import World
from weft.search.budget import Auto
from weft.strategy.strategy import Strategy, data_parallel
from weft.strategy.text import plain
from weft.tensor.spec import mesh_of
from weft.tracebacks import shortened
from weft.version import __version__

T = TypeVar("T")


@shortened
@uncollected()
def compile(
    model: nn.Module | Step,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: Optimizing = None,
    example_batch: Any = None,
    *,
    placement: Placement,
    strategy: Strategy | Auto | Literal["auto"] | None = None,
    seed: int | None = None,
    kernels: Kernels = "aten",
    batch: Literal["whole", "local"] = "whole",
    metrics: Sequence[Metric] = (),
    shapes: Buckets | None = None,
    verify: bool = False,
    weights: str | Path | Weights | None = None,
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
            have `reset_parameters()`, or the model `_init_weights(module)`, or with `weights`. A model
            whose parameters an open program holds already is shared; `weft.release` gives it back.
            Or a `weft.Step`, which holds this and the next three and is captured once for all
            strategies.
        loss_fn: `loss_fn(model, batch)` returns the loss, or a tuple or dict with it (see
            `weft.capture.capture`).
        optimizer: a `torch.optim` optimizer of the model's parameters, or a list of several, which
            share none, such as Muon for matrices and AdamW for the rest: each updates its own in
            every step, and gradients are clipped and measured all together. Hyperparameters are
            read before every step, so schedulers work; states become global tensors, too. None
            compiles an evaluation step: no backward, the model in eval mode.
        example_batch: nest of tensors of the whole batch's shapes and dtypes; its values are not
            used, but by `verify` and where a `weft.Auto` measures.
        placement: the ranks to run on, those of all stages; inside `weft.local_world` or under
            torchrun.
        strategy: what the user fixes; everything else is deduced. By default data parallel. "auto", or a `weft.Auto`
            with its options, searches the fastest one on these ranks, in any grid of them, as `weft.search` does;
            `Program.strategy` says what was found.
        seed: of the random ops; by default torch's initial seed on the first rank, as it is now: `torch.manual_seed`
            between steps changes nothing.
        kernels: how local work runs: "aten" as calls of torch's ops, which is quick to compile, with kernels of
            weft's own in place of some that are slow (on CPUs large products by oneDNN, norms, losses, products that
            are joined); "torch" as calls of torch's ops alone, so that a comparison with plain PyTorch shows no
            kernels (predictions are still those of "aten"; what a split op needs and torch lacks remains, such as
            statistics of a BatchNorm whose batch is split); "inductor" compiled by torch's Inductor, each distinct
            layer once; "auto" measures both for each distinct layer and takes the faster. Compiled code and timings
            are kept in the folder `WEFT_CACHE` (by default `~/.cache/weft`), which nobody else may write to. On CUDA,
            segments are replayed as CUDA graphs where launching takes longer than computing; the variable
            `WEFT_CUDA_GRAPHS` ("auto", "always" or "never") says otherwise.
        batch: "whole": what every process passes to `step` is the whole batch, the same on all; a
            difference is an error. "local": each process passes its own rows, as with a
            `DistributedSampler`, all as many; the layouts of leaves say which axes split them.
        metrics: what `Program.metrics` holds after each step that updates: "grad_norm", the norm of
            all gradients together before they are clipped.
        shapes: lengths that batches are padded to; without, the step is planned for each shape that
            comes.
        verify: run `Program.verify` with the example batch, which then needs values.
        weights: a checkpoint, or a folder of safetensors as Hugging Face has them, whose values the model begins with;
            or a `weft.Weights`, where names are others or some are missing.
            With a model on the meta device each rank reads its own parts; no process holds the whole.

    Raises:
        CaptureError: the step cannot be one graph; names the user's line. A parameter is in two
            optimizers.
        StrategyError: a name pattern of the strategy matches nothing, or stages do not fit.
        LayoutError: a layout does not fit a tensor, or the placement does not fit the world.
        RuleError: an op has no sharding rule.
        VerificationError: with `verify`, a plain eager step gives something else; names it and the line.
        UserError: an open program holds the model's parameters in other layouts; a graph of autograd
            needs their values; or `kernels` is "inductor" and there is no compiler for it; or others
            may write to the folder where compiled code is kept; or torch.autocast or
            torch.inference_mode is around the call; or another thread works with the ranks.
    """
    if not isinstance(placement, Placement):
        raise wrong(
            "weft.compile: placement=", 'weft.placement("cpu", [0, 1]) or the like', placement
        )
    world = current_world(placement.device_type)
    with at_work(world, "weft.compile", lock_of(world)):
        world.calls.enter("compile")
        fixed, auto = split_strategy_argument(strategy, batch)
        fixed = data_parallel() if fixed is None else fixed
        session = _Session(world, placement, fixed, kernels, batch, metrics, shapes)
        trains = bool(model.optimizers) if isinstance(model, Step) else optimizer is not None
        check_alike(world, "what is asked for", lambda: session.asked(trains, auto))
        if session.local is not None:
            mesh_of(placement)  # opens its channels
        given = model, loss_fn, optimizer, example_batch, verify
        step, example = session.all("the step", lambda: session.step(*given))
        if world.several:
            check_alike(world, "model and optimizer", lambda: asked_of_step(step))
        if auto is not None:
            found, ranks = session.searched(step, auto)
            session = replace(session, strategy=found, placement=ranks)
        program = session.program(step, seed, weights)
        try:
            if weights is not None:
                program.load(weights, model_only=True)
            if verify:
                program.verify(example)
        except BaseException:
            program.close()
            raise
        return program


@final
@dataclass(frozen=True)
class _Session:
    """One call of `compile`, and the work that all processes do in it; it knows all arguments but those of the step."""

    world: World
    placement: Placement
    strategy: Strategy
    kernels: Kernels
    batch: Literal["whole", "local"]
    metrics: Sequence[Metric]
    shapes: Buckets | None

    def all(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work` here, once it has succeeded in all processes."""
        return run_on_all(self.world, what, work)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return local_ranks(self.world, self.placement)

    @cached_property
    def local(self) -> LocalBatch | None:
        wanted = self.batch == "local"
        return LocalBatch(self.strategy, self.placement, self.world) if wanted else None

    @cached_property
    def usable(self) -> Kernels:
        return usable_kernels(self.kernels, self.placement.device_type)

    def asked(self, trains: bool, auto: Auto | None) -> dict[str, str]:
        """The arguments, as `check_alike` takes them, once nothing stands against them; `trains` by an optimizer."""
        self._check_arguments()
        grid, placement, strategy = tuple(self.strategy.grid), self.placement, self.strategy
        if grid and grid != placement.shape:
            raise StrategyError(
                f"the strategy is for a grid of {'x'.join(map(str, grid))} ranks, the placement is "
                f"{'x'.join(map(str, placement.shape))}; give weft.placement its ranks in rows of that grid, or leave "
                "the strategy's grid out"
            )
        precision, _ = options_of(strategy).precision, self.ranks
        check_modes("weft.compile", placement.device_type, precision, trains)
        _ = self.local, self.usable
        found: dict[str, object] = {
            f"strategy.{one.name}": plain(one.name, getattr(strategy, one.name))
            for one in fields(strategy)
        }
        found |= {"kernels": self.kernels, "batch": self.batch, "metrics": list(self.metrics)}
        found |= {"shapes": self.shapes, "strategy": auto}
        found |= {"weft": __version__, "torch": torch.__version__}
        return {"placement": str(placement), **{name: repr(x) for name, x in found.items()}}

    def _check_arguments(self) -> None:
        if self.shapes is not None and not isinstance(self.shapes, Buckets):
            raise wrong("shapes=", "a weft.Buckets", self.shapes)
        if not isinstance(self.strategy, Strategy):
            raise wrong("strategy=", "a weft.Strategy", self.strategy, StrategyError)
        if self.batch not in ("whole", "local"):
            raise wrong("batch=", '"whole" or "local"', self.batch)
        if not isinstance(self.metrics, Sequence) or isinstance(self.metrics, str):
            raise wrong("metrics=", f"a list of names among {list(METRICS)}", self.metrics)
        for name in self.metrics:
            if name not in METRICS:
                raise wrong("metrics=", f"names among {list(METRICS)}", name)

    def step(
        self,
        model: nn.Module | Step,
        loss_fn: Callable[[nn.Module, Any], Any] | None,
        optimizer: Optimizing,
        example_batch: Any,
        verify: bool,
    ) -> tuple[Step, Any]:
        """The step that the arguments of `compile` stand for, and its batch as it was given."""
        if isinstance(model, Step):
            if any(each is not None for each in (loss_fn, optimizer, example_batch)):
                raise UserError(
                    "weft.compile of a weft.Step takes no loss_fn, optimizer or example_batch: the step has them"
                )
            step, given = model, model.example_batch
            if self.shapes is not None:
                step = step.of_shape(self.shapes.padded(given))
        elif loss_fn is None:
            raise UserError(
                "weft.compile takes a model, loss_fn, optimizer and example_batch, got no loss_fn"
            )
        elif not isinstance(model, nn.Module):
            raise wrong(
                "weft.compile: model", "a torch.nn.Module with its loss_fn, or a weft.Step", model
            )
        else:
            given = example = example_batch
            if self.shapes is not None:
                example = self.shapes.padded(given)
            if self.local is not None:
                example = self.local.whole(example)
            step = Step(model, loss_fn, optimizer, example)
        if not isinstance(verify, bool):
            raise wrong("verify=", "True or False", verify)
        if verify:
            check_values(given)
        return step, given

    def searched(self, step: Step, auto: Auto) -> tuple[Strategy, Placement]:
        """The strategy that a search finds, and the ranks of the placement in its grid."""
        with progress(0 in self.ranks) as begin:
            begin("searching for a strategy")
            held = live_shardings(step.model, self.world)
            spare = SPARE if held.layouts else 0
            candidates = choose_strategy(self.world, step, self.placement, auto, spare)
            trials = Trials(self.world, step, self.usable)
            if spare:
                candidates = trials.lying_alike(candidates, max(auto.measure, 1), held)
            if len(candidates) == 1:
                return candidates[0]
            begin("running the best candidates")
            return trials.fastest(candidates)

    def program(
        self, step: Step, seed: int | None, weights: str | Path | Weights | None
    ) -> Program:
        """The program of a step, whose model it takes over."""
        world, placement, kernels = self.world, self.placement, self.usable
        held = live_shardings(step.model, world)
        planner = planner_of(world, step, self.strategy, placement, kernels, held, self.metrics)
        with progress(0 in self.ranks) as begin:

            def plan() -> Planned:
                """For the example batch; the optimizers' states fit it, and nothing is taken over yet."""
                planned = planner.plan(step, begin)
                check_states(step.model, step.optimizers, planned[1].graph)
                return planned

            first = self.all("the plan", plan)
            graph, stored = first[1].graph, first[1].stored
            begin("filling variables")
            later: Collection[str] = ()
            if weights is not None:
                files, _ = located(weights)
                later = self.all("the weights", lambda: weights_in(files, step.model))
                held_in = {"what weights= holds": str(sorted(later))}
                check_alike(world, "which weights", lambda: held_in)
            variables = take_over(step.model, graph, stored, world, placement, later)
            seed = torch.initial_seed() if seed is None else seed
            seed = int(gathered(world, "the seed", lambda: str(seed))[0])
            setting = ProgramSetting(
                *(step.model, world, placement, planner.options, variables, seed, self.strategy),
                *(kernels, self.local, self.shapes),
            )
            add_loss_scale(setting, graph)
            add_main_parameters(variables, graph)
            begin("starting the ranks" if kernels in UNCOMPILED else "compiling kernels")
            training = Training(setting, step.optimizers)
            every = planner.variants(setting, step, first, training.add_plan)

            def adding() -> Variants:
                bare = planner.bare
                planned = self.all("the plan", lambda: bare.plan(step.now(), like=first[1]))
                return bare.variants(setting, step, planned, training.add_plan)

            training.adds_by(every if planner.bare == planner else adding)
            program = Program(every, step, training)
            give_back()
        return program
