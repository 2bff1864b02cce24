"""The segments that are captured as CUDA graphs, decided from the plan alone.

A graph puts all calls of a segment on the device with one launch. It pays where the host needs
longer to launch a step than the device to run it (docs/decisions/cuda-graphs.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.hardware import Device
from weft.hardware.durations import Durations
from weft.ir.plan import Compute, GraphMode, LocalCall, LocalProgram, LocalUpdate, RankPlan, Replays
from weft.ops import shares_memory
from weft.ops.weft_ops import WEFT_OPS
from weft.units import Seconds

# A segment of fewer launches gains nothing: replaying is a launch, and so is copying what goes in.
FEWEST_LAUNCHES = 4
# No kernel takes less of the device.
SHORTEST = Seconds(2e-6)


def replays(
    plan: RankPlan,
    program: LocalProgram,
    device: Device,
    mode: GraphMode,
    obstacle: Callable[[str], str | None],
) -> tuple[RankPlan, Replays]:
    """Decide for a rank.

    Args:
        plan: of the rank.
        program: that it was made from.
        device: estimates, with the seconds of a launch as `start`.
        mode: what the user wants.
        obstacle: says of an op why it cannot be captured; None when it can.

    Returns:
        The plan with marks on what is replayed, its updates never, and how that was found.
    """
    segments = [actor for actor in plan.actors if isinstance(actor, Compute)]
    launches = {each.id: segment_launches(each) * each.acts for each in segments}
    seconds = Durations(replace(device, start=SHORTEST), ()).of(program, list(map(_bare, segments)))
    busy = Seconds(sum(one * each.acts for one, each in zip(seconds, segments, strict=True)))
    host = Seconds(device.start * sum(launches.values()))
    reasons: dict[int, str] = {}
    for each in segments:
        why = _off(mode, host, busy) or _obstacle(each, obstacle)
        if why is None and launches[each.id] < FEWEST_LAUNCHES * each.acts:
            why = "few launches"
        if why is not None:
            reasons[each.id] = why
    chosen = frozenset(each.id for each in segments if each.id not in reasons)
    saved = sum(launches[each.id] - each.acts for each in segments if each.id in chosen)
    total = sum(launches.values())
    marked = [
        replace(actor, replayed=True)
        if isinstance(actor, Compute) and actor.id in chosen
        else actor
        for actor in plan.actors
    ]
    found = Replays(reasons, total, saved, Seconds(host), Seconds(busy))
    return replace(plan, actors=tuple(marked)), found


def segment_launches(segment: Compute) -> int:
    """The number of launches by the host for the calls of one act: views are none; updates are left out."""
    return sum(_kernels(node) for node in segment.nodes if isinstance(node, LocalCall))


def _kernels(node: LocalCall | LocalUpdate) -> int:
    if isinstance(node, LocalUpdate):
        return 1
    own = WEFT_OPS.get(node.op)
    return int(not shares_memory(node.op)) if own is None else own.launches


def _bare(segment: Compute) -> Compute:
    """Without what takes no time of the device."""
    return replace(segment, nodes=tuple(node for node in segment.nodes if _kernels(node)))


def _off(mode: GraphMode, host: Seconds, device: Seconds) -> str | None:
    if mode == "never":
        return "switched off"
    return "the device takes longer than the host" if mode == "auto" and device > host else None


def _obstacle(segment: Compute, obstacle: Callable[[str], str | None]) -> str | None:
    for node in segment.nodes:
        why = None if isinstance(node, LocalUpdate) else obstacle(node.op)
        if why is not None:
            return why
    return None
