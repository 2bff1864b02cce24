"""Read the logs of a run by the libraries that they are for.

    python recipes/checks/read_logs.py runs/gpt read.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore


def of_tensorboard(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses of the event files in a folder."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(each.step, each.value) for each in events.Scalars("loss")]


def of_wandb(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses of the one run that is kept in a folder."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    store = DataStore()
    store.open_for_scan(str(path))
    found = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {
                each.key or "/".join(each.nested_key): json.loads(each.value_json)
                for each in record.history.item
            }
            found.append((row.get("_step", record.history.step.num), row["loss"]))
    return found


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
