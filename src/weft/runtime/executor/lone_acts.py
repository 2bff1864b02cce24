"""Work of the compute thread before it sleeps: run a communication itself, where nothing else can go on meanwhile.

Handing an act to another thread and its result back takes longer than a small collective does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import final

from weft.runtime.channels.channel import Channel
from weft.runtime.executor.queues import Queue


@final
class LoneActs:
    """Runs acts of communicators on the compute thread.

    Args:
        compute: the queue of this thread.
        others: all other queues of the rank, each with a thread of its own.
        channels: those that the acts of other queues use, by the name of the queue. Acts of a queue
            without one, such as copies to the host, are left to its thread.
    """

    def __init__(
        self, compute: Queue, others: Sequence[Queue], channels: Mapping[str, Channel]
    ) -> None:
        self._compute = compute
        self._others = tuple(others)
        self._channels = channels

    def run(self) -> None:
        """Have done what the compute queue has sent: here, if it is all that the rank can do, or by other threads.

        Were there anything else that could go on, it might give the compute queue an act, for which
        the peers might wait before they come to the communication that runs here.

        Raises:
            ActError: when an actor raises.
        """
        told = dict.fromkeys(self._compute.told)
        self._compute.told.clear()
        ready = [queue for queue in told if queue.prepare()]
        if len(ready) == 1 and self._acted(ready[0]):
            return
        for queue in ready:
            queue.bell.put(None)

    def _acted(self, queue: Queue) -> bool:
        """Run the act of a queue if all other queues rest; whether it was run."""
        channel = self._channels.get(queue.name)
        if channel is None or not channel.interruptible:
            return False
        with ExitStack() as held:
            for each in self._others:
                if not each.lock.acquire(blocking=False):
                    return False
                held.callback(each.lock.release)
            if not self._compute.mailbox.empty() or not all(
                each is queue or each.rests for each in self._others
            ):
                return False
            # Nobody else needs this core now.
            channel.spins = True
            try:
                queue.act_here()
            finally:
                channel.spins = False
        return True
