"""Rows of published measurements, read from gzipped CSV files of three forms into one."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.accuracy.decoder import Form
from benchmarks.accuracy.published import published
from benchmarks.accuracy.row import Row, Told


class UnknownColumns(ValueError):
    """A file whose columns are none of the known forms."""


def read_rows(path: Path) -> Iterator[Row | str]:
    """The rows of a file; in place of one that cannot be predicted, the reason.

    Raises:
        UnknownColumns: when the columns are none of the known forms.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="") as file:
        reader = csv.DictReader(file)
        columns = frozenset(reader.fieldnames or ())
        read = next((read for known, read in _FORMS if known <= columns), None)
        if read is None:
            raise UnknownColumns(f"all: unknown columns {sorted(columns)}")
        name = path.name.split(".")[0]
        for number, told in enumerate(reader, 2):
            yield _row(read, name, number, told)


def _row(read: Callable[[str, int, Told], Row], name: str, number: int, told: Told) -> Row | str:
    try:
        return read(name, number, told)
    except (LookupError, ValueError, ArithmeticError) as error:
        missing = isinstance(error, KeyError)
        return f"no column {error}" if missing else str(error)


def _vtrain(name: str, number: int, told: Told) -> Row:
    width, layers = int(told["hidden size"]), int(told["# layers"])
    data, stages = int(told["data parallelism"]), int(told["pipeline parallelism"])
    sequences, gpus = int(told["micro batch"]), int(told["# GPUs"])
    size = told.get("Parameters (billion)")
    same = f"{size}B" if size else f"L{layers} h{width} B{told['global batch']}"
    heads = int(told["attention heads"])
    return Row(
        file=name,
        group=f"{same} on {gpus}",
        id=str(number),
        form=Form(
            width, heads, heads, 4 * width, 51200, int(told["sequence length"]), dropout=True
        ),
        layers=layers,
        data=data,
        tensor=int(told["tensor parallelism"]),
        pipeline=stages,
        chunks=1,
        zero=0,
        sequences=sequences,
        micro_batches=int(told["global batch"]) // (data * sequences),
        recompute="full",
        sequence_parallel=False,
        dtype="float16",
        topology="a100-80gb",
        schedule="1f1b",
        seconds=float(told["iteration time (ms)"]) / 1e3,
        memory=None,
    )


def _sailor(name: str, number: int, told: Told) -> Row:
    """OPT-350M (arXiv 2205.01068, table 1): its units are the embedding, 24 layers and the last layer."""
    if told["model"] != "OPT-350M":
        raise ValueError(f"model {told['model']!r}")
    if "GH" not in told["gpus_per_stage"]:
        raise ValueError(f"devices {told['gpus_per_stage']!r}")
    stages, data, tensor = (int(told[key]) for key in ("pp", "dp", "tp"))
    sequences = int(told["micro_batch"])
    return Row(
        file=name,
        group=f"{told['model']} on {stages * data * tensor}",
        id=told["source_file"],
        form=Form(1024, 16, 16, 4096, 50304, 2048, dropout=True),
        layers=24,
        data=data,
        tensor=tensor,
        pipeline=stages,
        chunks=1,
        zero=0,
        sequences=sequences,
        micro_batches=int(told["global_batch"]) // (data * sequences),
        recompute="none",
        sequence_parallel=False,
        dtype="float16",
        topology="gh200",
        schedule="1f1b",
        seconds=float(told["step_time_s"]),
        memory=float(told["max_mem_bytes"]),
    )


_FORMS: tuple[tuple[frozenset[str], Callable[[str, int, Told], Row]], ...] = (
    (frozenset(("# GPUs", "micro batch", "iteration time (ms)")), _vtrain),
    (frozenset(("layers_per_stage", "max_mem_bytes")), _sailor),
    (frozenset(("row_id", "group", "step_time_s_derived", "micro_batch")), published),
)
