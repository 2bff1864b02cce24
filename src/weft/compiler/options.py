"""What the passes may be told: stages, time and memory, by a strategy; costs and sizes, by those who tune."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from weft.compiler.training.precision import Precision
from weft.errors import StrategyError
from weft.hardware import CostModel, Device
from weft.layout import Placement
from weft.patterns import name_patterns

Schedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Metric: TypeAlias = Literal["grad_norm"]
METRICS: tuple[Metric, ...] = get_args(Metric)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Stage:
    """A part of the model and the ranks that run it.

    Attributes:
        patterns: of module paths ("embed", "blocks.[0-3].*"); a module's stage is also that of all
            modules and parameters below it. Parameters' own names may be given too
            (docs/patterns.md).
        placement: where this part runs.
    """

    patterns: tuple[str, ...]
    placement: Placement

    def __init__(self, patterns: Iterable[str], placement: Placement) -> None:
        object.__setattr__(self, "patterns", name_patterns("weft.Stage(…)", patterns))
        object.__setattr__(self, "placement", placement)
        if not isinstance(placement, Placement):
            raise StrategyError(
                f"weft.Stage({list(self.patterns)}, placement=…) takes a weft.placement, found {placement!r}"
            )


@dataclass(frozen=True)
class Zero:
    """Optimizer states (level 1), gradients too (2), parameters too (3) are sharded along an axis.

    The levels are those of ZeRO (Rajbhandari et al. 2020, section 5).

    Attributes:
        level: 1, 2 or 3.
        axis: of the placement.
    """

    level: Literal[1, 2, 3]
    axis: int = 0

    def __post_init__(self) -> None:
        if self.level not in (1, 2, 3) or isinstance(self.level, bool):
            raise StrategyError(f"weft.Zero(level=…) takes 1, 2 or 3, found {self.level!r}")
        if not isinstance(self.axis, int) or isinstance(self.axis, bool) or self.axis < 0:
            raise StrategyError(
                f"weft.Zero(axis=…) takes the number of an axis of the placement, found {self.axis!r}"
            )


@dataclass(frozen=True)
class Options:
    """What the passes may be told.

    Attributes:
        cost_model: what work and communication cost.
        bucket_bytes: size up to which small collectives are joined; None takes that of the device
            (`Device.bucket`).
        stages: parts of the model in order, or into how many it is cut; () for one.
        micro_batches: number of parts of the batch in time.
        schedule: a named preset of credits and priorities; None for the computed one.
        zero: how states, gradients and parameters are sharded.
        recompute: patterns of modules whose forward runs again in the backward.
        offload: patterns of modules whose results wait in host memory for the backward.
        precision: of work, exchanges and sums; None leaves the model's own.
        clip_norm: largest global norm of the gradients.
        memory_limit: bytes on each rank.
        activations: patterns of modules, and the SBPs of what they return, as texts of hints.
        modules: paths of all modules of the model: patterns may also name one that has no op.
        device: what computes and what connects the ranks; None takes the usual figures of the type.
        metrics: names of what is measured in each step beside what the loss function returns
            ("grad_norm").
        expert_capacity: rows that a rank may send to the experts of another, in even shares; None
            for all that there can be.
    """

    cost_model: CostModel = field(default_factory=CostModel)
    bucket_bytes: int | None = None
    stages: tuple[Stage, ...] | int = ()
    micro_batches: int = 1
    schedule: Schedule | None = None
    zero: Zero | None = None
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    precision: Precision | None = None
    clip_norm: float | None = None
    metrics: tuple[Metric, ...] = ()
    memory_limit: int | None = None
    activations: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, ...] = ()
    device: Device | None = None
    expert_capacity: float | None = None
