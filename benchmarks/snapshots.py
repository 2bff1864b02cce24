"""What snapshots in memory cost: seconds of a step without them and with one after each, and bytes that ranks send.

    weft run -n 2 benchmarks/snapshots.py --json runs/bench/snapshots.json
    WEFT_TRANSPORT=gloo weft run -n 2 benchmarks/snapshots.py
    python -m benchmarks.links --rate 1gbit -n 2 benchmarks/snapshots.py

A GPT of 6 layers of width 512 with AdamW on two ranks, each of which stands for a host: its snapshots lie in a folder
of their own in memory, with a copy of the other one's. Steps without and with them take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from benchmarks.measure import interleave, machine
from benchmarks.works.table import gpt_work

STRATEGIES = {
    "data parallel": weft.Strategy(batch={"*": weft.split(0)}),
    "ZeRO 3": weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
}


class Side:
    """A program, with snapshots of its own.

    Args:
        strategy: of the program.
        o: sizes.
    """

    def __init__(self, name: str, o: argparse.Namespace) -> None:
        work = gpt_work(o.layers, o.width, o.length, o.batch)
        model, self.batch = work.model(), work.batch()
        self.program = weft.compile(
            *(model, work.loss_fn, work.optimizer(model.parameters()), self.batch),
            placement=weft.placement("cpu", range(int(os.environ["WORLD_SIZE"]))),
            strategy=STRATEGIES[name],
        )
        self.folder = Path.cwd() / f"none of {name}"
        # Seconds for which calls held a step.
        self.held: list[float] = []

    def step(self) -> None:
        """Without a snapshot."""
        self.program.step(self.batch)

    def step_and_snapshot(self) -> None:
        """With one, which the next step has the time to bring to the other host."""
        self.program.step(self.batch)
        begin = perf_counter()
        self.program.save_in_memory(self.folder)
        self.held.append(perf_counter() - begin)

    def alone(self) -> float:
        """Seconds until a snapshot is whole while no step is made."""
        begin = perf_counter()
        self.program.save_in_memory(self.folder)
        self.program.wait_for_memory()
        return perf_counter() - begin

    def sent(self) -> int:
        """Bytes that this rank sends to its buddy for a snapshot; files of both generations are there afterwards."""
        self.alone()
        line = self.program._snapshots[self.folder].shelf.line
        before = 0 if line.channel is None else line.channel.sent.total()
        self.alone()
        return 0 if line.channel is None else line.channel.sent.total() - before


def measured(name: str, o: argparse.Namespace) -> dict[str, Any]:
    """The figures of a strategy, the medians over rounds of the slowest rank's."""
    side = Side(name, o)
    side.step()
    sent, alone = side.sent(), [side.alone() for _ in range(o.rounds)]
    sides: dict[str, Callable[[], object]] = {
        "without": side.step,
        "with": side.step_and_snapshot,
    }
    side.held.clear()
    exchange = side.program.exchange or (lambda text: [text])

    def before() -> None:
        side.program.wait_for_memory()
        exchange("")

    seconds = interleave(sides, o.rounds, o.steps, before)
    own = {**seconds, "alone": alone, "held": side.held}
    every = [json.loads(text) for text in exchange(json.dumps(own))]
    slowest = {
        key: [max(x) for x in zip(*(each[key] for each in every), strict=True)] for key in own
    }
    ratios = [a / b for a, b in zip(slowest["with"], slowest["without"], strict=True)]
    side.program.close()
    return {
        "seconds": {key: median(each) for key, each in slowest.items()},
        "ratio": [min(ratios), median(ratios), max(ratios)],
        "sent": sent,
        "rounds": slowest,
    }


def main() -> None:
    """Measure, print a line for each strategy, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, value in {"layers": 6, "width": 512, "length": 256, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    rank, transport = os.environ["RANK"], os.environ.get("WEFT_TRANSPORT", "shared")
    # The folder of weft run goes with it, however it ends.
    memory = os.environ.get("WEFT_SNAPSHOTS", "/dev/shm")
    with tempfile.TemporaryDirectory(prefix="weft-host-", dir=memory) as host:
        os.environ["WEFT_SNAPSHOTS"] = host
        rows = {name: measured(name, o) for name in STRATEGIES}
    for name, row in rows.items() if rank == "0" else ():
        s, (least, usual, most) = row["seconds"], row["ratio"]
        print(
            f"{name} over {transport}: step {s['without']:.3f} s without, {s['with']:.3f} s with a snapshot after "
            f"each ({usual:.2f} of it, {least:.2f} to {most:.2f}); held {s['held']:.3f} s, whole after "
            f"{s['alone']:.3f} s alone; {row['sent'] / 1e6:.1f} MB sent a rank"
        )
    if o.json and rank == "0":
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps({"machine": machine(), "transport": transport, "rows": rows}))


if __name__ == "__main__":
    main()
