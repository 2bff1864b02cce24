"""The message when a rank does nothing for too long: whom all wait for, who runs, and who waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.actors import Act, QueueStatistics, actor_text, root_cause, waiting_text, when_text
from weft.ir.plan import Communicate, RankPlan
from weft.runtime.channels.channel import Channel


def silence_text(
    plan: RankPlan, statistics: Sequence[QueueStatistics], channels: Mapping[int, Channel]
) -> str:
    """Names actors with what they wait for: registers, free copies, their turn, peers.

    Args:
        plan: the rank's plan.
        statistics: of all its queues.
        channels: the rank's ends of communicators, by id.

    Returns:
        On the first line what is at the root of it; then a line for each actor.
    """
    acts = {queue.running.actor: queue.running for queue in statistics if queue.running}
    blamed = root_cause(plan, statistics)
    names = [actor_text(plan.actors[id]) for id in blamed]
    root = f"everything waits for {''.join(names)}"
    if len(blamed) > 1:
        root = f"each of {', '.join(names)} waits for the next one"
    elif blamed and blamed[0] in acts:
        root += f", which {_doing(plan, acts[blamed[0]], channels)}"
    lines = [
        f"  {actor_text(plan.actors[id])} {_doing(plan, act, channels)}" for id, act in acts.items()
    ]
    return "\n".join([root, waiting_text(plan, statistics), *lines])


def _doing(plan: RankPlan, act: Act, channels: Mapping[int, Channel]) -> str:
    """The work of an actor that runs, in words: wait for its peers, if it communicates."""
    actor = plan.actors[act.actor]
    when = when_text(actor, act.step, act.micro)
    if not isinstance(actor, Communicate):
        return f"has not ended in {when}"
    ranks = channels[actor.collectives[0].communicator].ranks
    peers = [rank for rank in ranks if rank != plan.rank]
    return f"waits for ranks {peers} in {when}"
