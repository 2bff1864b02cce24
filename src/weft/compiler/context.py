"""The `Context` that passes are told besides the graph or program that they rewrite, and the `Stages` in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, final, get_args

from weft.cached import cached_property
from weft.compiler.hints import GridHints
from weft.compiler.pass_cache import PassCache, ReadInParts
from weft.hardware import CostModel
from weft.hardware.costs import Costs
from weft.hardware.planning_costs import bucket_bytes, costs_or_usual
from weft.ir.logical import LogicalGraph
from weft.layout import SBP, Layout, Placement, broadcast_layout
from weft.strategy.parts import Schedule, Stage, Zero, ZeroRules, zero_rules
from weft.strategy.precision import Precision, precision_of
from weft.strategy.strategy import Strategy
from weft.strategy.text import LAYOUTS, sbps_of
from weft.units import Bytes

Metric: TypeAlias = Literal["grad_norm"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@final
@dataclass(frozen=True)
class Options(ReadInParts):
    """The options of the passes.

    Attributes:
        bucket_bytes: size up to which small collectives are joined; None uses the costs
            (`weft.hardware.planning_costs.bucket_bytes`).
        stages: parts of the model in order, or the number of stages; () for one.
        schedule: a named preset of credits and priorities; None for the computed one.
        in_flight: for each stage, the most micro-batches between its forward and the end of its backward; None
            for those of the schedule.
        zero: how states, gradients and parameters are sharded, all alike or by patterns of parameters.
        recompute: patterns of modules whose forward runs again in the backward.
        offload: patterns of modules whose activations are kept in host memory until the backward.
        precision: of work, exchanges and sums; None leaves the model's own.
        memory_limit: bytes on each rank.
        activations: patterns of modules, and the SBPs of what they return, one for all axes or for each.
        modules: paths of all modules of the model: patterns may also name one that has no op.
        costs: seconds of what the ranks compute and exchange, the same on all of them; None takes the
            usual figures of the device type.
        metrics: names of what is measured in each step beside what the loss function returns
            ("grad_norm").
        expert_capacity: rows that a rank may send to the experts of another, in even shares; None for the maximum.
        most_classes: of ranks that are not alike, where all of them are planned; what has more is refused. None
            refuses nothing.
        own_kernels: whether kernels of weft's own, and products that it joins, may stand for torch's ops.
    """

    cost_model: CostModel = field(default_factory=CostModel)
    bucket_bytes: Bytes | None = None
    stages: tuple[Stage, ...] | int = ()
    micro_batches: int = 1
    schedule: Schedule | None = None
    in_flight: tuple[int, ...] | None = None
    zero: Zero | ZeroRules | None = None
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    precision: Precision | None = None
    clip_norm: float | None = None
    metrics: tuple[Metric, ...] = ()
    memory_limit: Bytes | None = None
    activations: tuple[tuple[str, tuple[SBP, ...]], ...] = ()
    modules: tuple[str, ...] = ()
    costs: Costs | None = None
    expert_capacity: float | None = None
    most_classes: int | None = None
    own_kernels: bool = True


def options_of(strategy: Strategy) -> Options:
    """The options that the passes need from a strategy; the rest as it is for all."""
    names = (
        each.name for each in fields(strategy) if each.name not in (*LAYOUTS, "signatures", "grid")
    )
    laid = tuple((pattern, sbps_of(sbp)) for pattern, sbp in strategy.activations.items())
    told = {name: getattr(strategy, name) for name in names}
    if not isinstance(strategy.zero, Zero | None):
        told["zero"] = zero_rules(
            strategy.zero
        )  # pairs: patterns in another order mean something else
    return Options(
        **{**told, "precision": precision_of(strategy.precision)},
        activations=laid,
    )


@final
@dataclass(frozen=True)
class Stages:
    """The placements of stages, and the homes of variables.

    Attributes:
        placements: of stage 0, 1, ….
        calls: the stage of each forward call, by the name of its first result, its op and its module.
    """

    placements: tuple[Placement, ...]
    homes: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[tuple[str, str, str], int] = field(default_factory=dict)

    def everywhere(self) -> Layout:
        """Whole on every rank of every stage: how the results of a step are handed out."""
        ranks = tuple(sorted({rank for each in self.placements for rank in each.ranks}))
        return broadcast_layout(Placement(self.placements[0].device_type, (len(ranks),), ranks))


@final
@dataclass(frozen=True)
class Context(ReadInParts):
    """The options of the user, and everything decided before a pass runs.

    Attributes:
        options: what the strategy says of stages, time and memory.
        hints: what the user fixed, by the number of axes of a stage's placement; from `choose_shards` on,
            with the layouts of shards.
        homes: the stages of parameters and buffers, where another program has decided them.
        before: the stages of the same step for another shape of the batch.
        stages: where they run, and where variables live (`choose_stages`).
        stored: for the key of each parameter that is sharded but is used whole, the axis (`choose_shards`).
        notes: texts on what a pass could not do as the strategy asks.
        graph: the graph with layouts that local programs are made of; None before there is one.
        parts: the number of parts of the batch for overlap.
        cache: results of passes from other plans; they do not change the plan.
    """

    placement: Placement
    options: Options = field(default_factory=Options)
    hints: GridHints = field(default_factory=dict)
    homes: Mapping[str, int] | None = None
    before: Stages | None = None
    stages: Stages = Stages(())
    stored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    graph: LogicalGraph | None = None
    parts: int = 1
    cache: PassCache = field(default=PassCache(), compare=False, repr=False)

    @property
    def costs(self) -> Costs:
        """The seconds of what the ranks compute and exchange."""
        return costs_or_usual(self.options.costs, self.placement.device_type)

    @cached_property
    def bucket_bytes(self) -> Bytes:
        """The size from which a bucket starts: as the strategy says it, or what pays among the ranks of a stage."""
        given = self.options.bucket_bytes
        if given is not None:
            return given
        stage = self.stages.placements[0] if self.stages.placements else self.placement
        return bucket_bytes(self.costs, stage.ranks)
