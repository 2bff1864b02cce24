"""What the costs of collectives say of measured all-reduces: `python -m benchmarks.accuracy_collectives FILE…`.

A file has the columns gpu, ranks, bytes and time_us, as vTrain's table of NCCL's all-reduces
(github.com/VIA-Research/vTrain) has them; it may be gzipped. Rows of the rank counts in `FITTED` served the
calibration; all others judge it. `--figures` takes the links' published figures alone, `--json` writes the table,
`--fit` prints what belongs under `calibrated` in `src/weft/hardware/catalogue/links.yaml`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.fit_collectives import Point, fitted
from weft.hardware.collectives import collective_seconds
from weft.hardware.topology import ANY, LinkKind, LinkProtocol, NodeGroup, Topology
from weft.hardware.topology_files import topology
from weft.units import Bytes, Seconds

# Rank counts whose rows the catalogue's calibration was fitted to.
FITTED = (2, 4)
MIB = 1 << 20
# Sizes from, and up to, so many bytes.
CLASSES = {
    "all": (0, 1 << 62),
    "< 1 MB": (0, MIB - 1),
    "1-8 MB": (MIB, 8 * MIB),
    "8-64 MB": (8 * MIB + 1, 64 * MIB),
    "> 64 MB": (64 * MIB + 1, 1 << 62),
}


@dataclass(frozen=True)
class Calibration:
    """What is fitted for a device's links.

    Attributes:
        machine: name of the topology on whose first devices it was measured.
        link: kind of the links.
        protocols: names of those that are told apart, the quickest to begin first.
        own: true where a device's own part is seen to take time: one switch link carries the whole ring at nearly the
            rate at which the kernel copies. Where slower links carry several rings, copying is hidden behind them.
    """

    machine: str
    link: str
    protocols: tuple[str, ...]
    own: bool


CALIBRATIONS = {
    "a100": Calibration("a100-80gb", "nvlink3", ("ll", "ll128", "simple"), own=True),
    "v100": Calibration("v100", "nvlink2", (ANY,), own=False),
}


@dataclass(frozen=True)
class Row:
    """A measured all-reduce: of so many bytes on each of so many ranks of a node."""

    gpu: str
    ranks: int
    size: Bytes
    seconds: Seconds


@dataclass(frozen=True)
class Score:
    """Errors of the rows of one device, rank count and class of sizes, as shares of the measured time.

    `bias` is the mean of the signed errors: above 0 where more is predicted than was measured.
    """

    gpu: str
    ranks: int
    sizes: str
    rows: int
    mean_error: float
    median_error: float
    bias: float
    judges: bool


def read(path: Path) -> list[Row]:
    """The rows of a file whose devices have a calibration."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [
        Row(
            one["gpu"],
            int(one["ranks"]),
            Bytes(int(one["bytes"])),
            Seconds(1e-6 * float(one["time_us"])),
        )
        for one in csv.DictReader(io.StringIO(text.decode()))
        if one["gpu"] in CALIBRATIONS
    ]


def scores(rows: Sequence[Row], calibrated: bool) -> Iterator[Score]:
    """The errors of the model, group by group."""
    machines = {gpu: topology(one.machine, calibrated) for gpu, one in CALIBRATIONS.items()}
    for gpu, ranks in sorted({(row.gpu, row.ranks) for row in rows}):
        group = [row for row in rows if (row.gpu, row.ranks) == (gpu, ranks)]
        errors = {row: predicted(machines[gpu], row) / row.seconds - 1 for row in group}
        for name, (least, most) in CLASSES.items():
            found = [error for row, error in errors.items() if least <= row.size <= most]
            if found:
                sizes = [abs(error) for error in found]
                yield Score(
                    *(gpu, ranks, name, len(found)),
                    *(mean(sizes), median(sizes), mean(found), ranks not in FITTED),
                )


def predicted(machine: Topology, row: Row) -> Seconds:
    """Seconds of the row's all-reduce."""
    return collective_seconds(machine, "all_reduce", row.size, [range(row.ranks)])


def fit(rows: Sequence[Row]) -> dict[str, Any]:
    """What belongs under `calibrated` of each kind of link."""
    found = {}
    for gpu, calibration in CALIBRATIONS.items():
        points = [
            Point(row.ranks, row.size, row.seconds, at_full_rate(calibration, row))
            for row in rows
            if row.gpu == gpu and row.ranks in FITTED
        ]
        if points:
            found[calibration.link] = fitted(points, calibration.protocols, calibration.own)
    return found


def at_full_rate(calibration: Calibration, row: Row) -> Seconds:
    """Seconds of the row's bytes alone: the links reach their whole rate, and nothing else takes time."""
    return predicted(_ideal(topology(calibration.machine)), row)


def _ideal(machine: Topology) -> Topology:
    (group,) = machine.groups
    links = tuple(replace(one, link=_ideal_link(one.link)) for one in group.kind.links)
    ports = tuple(replace(one, link=_ideal_link(one.link)) for one in group.kind.ports)
    kind = replace(group.kind, links=links, ports=ports)
    return replace(machine, groups=(NodeGroup(kind, group.count),))


def _ideal_link(link: LinkKind) -> LinkKind:
    whole = LinkProtocol(Seconds(0.0), Seconds(0.0), 1.0)
    return replace(link, latency=Seconds(0.0), protocols={ANY: whole}, own=None)


def table(found: Iterable[Score]) -> str:
    """The scores as text, a line each."""
    lines = [
        f"{'device':8}{'ranks':>6}  {'sizes':10}{'rows':>6}{'mean':>8}{'median':>8}{'bias':>8}"
    ]
    for one in found:
        lines.append(
            f"{one.gpu:8}{one.ranks:6}  {one.sizes:10}{one.rows:6}{one.mean_error:8.1%}"
            f"{one.median_error:8.1%}{one.bias:+8.1%}{'' if one.judges else '  (fitted)'}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--figures", action="store_true", help="the published figures alone")
    parser.add_argument("--fit", action="store_true", help="print a calibration in place of errors")
    parser.add_argument("--json", type=Path, help="where to write the table")
    given = parser.parse_args()
    rows = [row for path in given.files for row in read(path)]
    if given.fit:
        print(json.dumps(fit(rows), indent=2))
        return
    found = list(scores(rows, not given.figures))
    print(table(found))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
