"""What `Program.explain` says of CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.program.tables import table, text_of
from weft.runtime.replay import Replayer


def replay_text(replayers: Iterable[Replayer | None]) -> str:
    """For each rank that could replay segments, how much it does; nothing where none could."""
    return "".join(_text(each) for each in replayers if each is not None)


def _text(replayer: Replayer) -> str:
    found = replayer.found
    reasons = Counter({**found.reasons, **replayer.stopped}.values())
    graphs = len(replayer.plan.replayed - replayer.stopped.keys())
    title = f"CUDA graphs of rank {replayer.plan.rank}"
    estimate = (
        f"{found.launches} launches a step: {found.host * 1e3:.2f} ms of the host, "
        f"{found.device * 1e3:.2f} ms of the device (estimated); graphs spare {found.saved}"
    )
    rows = [(str(graphs), "replayed"), *((str(count), why) for why, count in reasons.items())]
    return text_of("", table(title, ("segments", "how"), rows), estimate)
