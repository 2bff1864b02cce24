"""Plans of one rank on their way, for tests of the passes that make them."""

from __future__ import annotations

from collections.abc import Sequence

from weft.compiler.context import Context, Options, Stages
from weft.compiler.schedule.bucket import bucket
from weft.compiler.schedule.credits import give_credits
from weft.compiler.schedule.draft import PlanDraft, PlanPass, run_on_draft
from weft.compiler.schedule.presets import Preset
from weft.compiler.schedule.segment import segment
from weft.ir.plan import Communicator, LocalProgram, RankPlan
from weft.layout import placement
from weft.strategy.parts import Zero, ZeroRules
from weft.units import Bytes

GROUPS = tuple(Communicator(number, (0, 1)) for number in range(3))
PAIR = placement("cpu", [0, 1])
BUCKET_BYTES = 2**22


def drafted(
    local: LocalProgram,
    *passes: PlanPass,
    bucket_bytes: int = BUCKET_BYTES,
    staged: bool = False,
    zero: Zero | ZeroRules | None = None,
    groups: Sequence[Communicator] = GROUPS,
    rule: Preset | None = None,
) -> PlanDraft:
    """The draft of a plan after some passes, in one stage or two; by default with actors, by `bucket` and `segment`."""
    options = Options(bucket_bytes=Bytes(bucket_bytes), zero=zero)
    context = Context(PAIR, options, stages=Stages((PAIR,) * (1 + staged)))
    draft = PlanDraft(local, tuple(groups), rule)
    return run_on_draft(passes or (bucket, segment), draft, context)


def planned(
    local: LocalProgram,
    *passes: PlanPass,
    bucket_bytes: int = BUCKET_BYTES,
    staged: bool = False,
    zero: Zero | ZeroRules | None = None,
    groups: Sequence[Communicator] = GROUPS,
    rule: Preset | None = None,
) -> RankPlan:
    """The plan by `bucket`, `segment`, some passes, and `give_credits`."""
    every = (bucket, segment, *passes, give_credits)
    told = {"bucket_bytes": bucket_bytes, "staged": staged, "zero": zero}
    plan = drafted(local, *every, groups=groups, rule=rule, **told).plan  # type: ignore[arg-type]
    assert plan is not None
    return plan
