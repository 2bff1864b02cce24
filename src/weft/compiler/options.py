"""The options of the passes: stages, time and memory, by a strategy; costs and sizes, by those who tune."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, final, get_args

from weft.hardware import CostModel
from weft.hardware.costs import Costs
from weft.layout import SBP
from weft.strategy.parts import Schedule, Stage, Zero
from weft.strategy.precision import Precision, precision_of
from weft.strategy.sharding import ZeroRules, zero_rules
from weft.strategy.strategy import Strategy
from weft.strategy.text import LAYOUTS, sbps_of
from weft.units import Bytes

Metric: TypeAlias = Literal["grad_norm"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@final
@dataclass(frozen=True)
class Options:
    """The options of the passes.

    Attributes:
        cost_model: what work and communication cost.
        bucket_bytes: size up to which small collectives are joined; None takes what the costs say
            (`weft.hardware.planning_costs.bucket_bytes`).
        stages: parts of the model in order, or into how many it is cut; () for one.
        micro_batches: number of parts of the batch in time.
        schedule: a named preset of credits and priorities; None for the computed one.
        in_flight: for each stage, the most micro-batches between its forward and the end of its backward; None
            for those of the schedule.
        zero: how states, gradients and parameters are sharded, all alike or by patterns of parameters.
        recompute: patterns of modules whose forward runs again in the backward.
        offload: patterns of modules whose results wait in host memory for the backward.
        precision: of work, exchanges and sums; None leaves the model's own.
        clip_norm: largest global norm of the gradients.
        memory_limit: bytes on each rank.
        activations: patterns of modules, and the SBPs of what they return, one for all axes or for each.
        modules: paths of all modules of the model: patterns may also name one that has no op.
        costs: seconds of what the ranks compute and exchange, the same on all of them; None takes the
            usual figures of the device type.
        metrics: names of what is measured in each step beside what the loss function returns
            ("grad_norm").
        expert_capacity: rows that a rank may send to the experts of another, in even shares; None
            for all that there can be.
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
    return Options(
        **{**told, "precision": precision_of(strategy.precision), "zero": _zero(strategy)},
        activations=laid,
    )


def _zero(strategy: Strategy) -> Zero | ZeroRules | None:
    """Patterns as pairs: in another order they are something else."""
    zero = strategy.zero
    return zero if zero is None or isinstance(zero, Zero) else zero_rules(zero)
