"""Read the logs of a run by the libraries that they are for.

    python recipes/checks/read_logs.py runs/gpt read.json

Writes steps and losses of each, as JSON.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

# Of each piece of LevelDB's log: a checksum, the bytes that follow, and which piece it is.
HEAD = struct.Struct("<IHB")
BLOCK = 2**15
WHOLE, LAST = 1, 4


def of_tensorboard(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses of the event files in a folder."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(each.step, each.value) for each in events.Scalars("loss")]


def of_wandb(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses of the one run that is kept in a folder: wandb's own messages, in a log as LevelDB has it."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for message in messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.WhichOneof("record_type") == "history":
            row = {each.key or "/".join(each.nested_key): each for each in record.history.item}
            found.append((record.history.step.num, float(value_of(row["loss"]))))
    return found


def value_of(item: Any) -> Any:
    """The value of an item of a history."""
    kind = item.WhichOneof("value")
    return (
        json.loads(item.value_json if kind is None else item.json)
        if kind in (None, "json")
        else getattr(item, kind)
    )


def messages(log: bytes) -> Iterator[bytes]:
    """The messages of a log in LevelDB's format, after a head of 7 bytes: in blocks, each in one piece or several."""
    at, pieces = HEAD.size, b""
    while at < len(log):
        left = BLOCK - at % BLOCK
        if left < HEAD.size:
            at += left
            continue
        _, size, kind = HEAD.unpack_from(log, at)
        pieces += log[at + HEAD.size : at + HEAD.size + size]
        at += HEAD.size + size
        if kind in (WHOLE, LAST):
            yield pieces
            pieces = b""


def of_prometheus(path: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Gauges by name, and the labels of the loss."""
    samples = [
        sample
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    ]
    (labels,) = (sample.labels for sample in samples if sample.name == "weft_loss")
    return {sample.name: sample.value for sample in samples}, labels


def main() -> None:
    out, result = map(Path, sys.argv[1:])
    gauges, labels = of_prometheus(out / "weft.prom")
    found: dict[str, Any] = {
        "tensorboard": of_tensorboard(out / "tensorboard"),
        "wandb": of_wandb(out),
        "prometheus": gauges,
        "labels": labels,
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
