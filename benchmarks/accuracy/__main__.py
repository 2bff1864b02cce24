"""Predictions of published rows by `weft.simulate` beside what was measured.

python -m benchmarks.accuracy --published FILE… [--json OUT] [--sample N] [--rows]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, TypeAlias

from benchmarks.accuracy.predict import Predicted, predict
from benchmarks.accuracy.row import Row
from benchmarks.accuracy.rows import UnknownColumns, read_rows
from benchmarks.accuracy.score import f1, score
from weft.errors import WeftError

# What figures that do not belong together end in: one row is left out, the others are predicted.
_REFUSED = (WeftError, ValueError, ArithmeticError, LookupError, RuntimeError, AssertionError)
# Rows that are not predicted, by their file and the reason.
LeftOut: TypeAlias = Counter[tuple[str, str]]


def told_rows(paths: Iterable[Path], left_out: LeftOut) -> Iterator[Row]:
    """The rows of files that can be predicted."""
    for path in paths:
        name = path.name.split(".")[0]
        try:
            for row in read_rows(path):
                if isinstance(row, str):
                    left_out[name, row] += 1
                else:
                    yield row
        except UnknownColumns as error:
            left_out[name, str(error)] += 1


def predictions(rows: Iterable[Row], left_out: LeftOut) -> Iterator[tuple[Row, Predicted]]:
    """Each row that can be planned, with its step."""
    for row in rows:
        try:
            yield row, predict(row)
        except _REFUSED as error:
            left_out[row.file, f"{type(error).__name__}: {error}".splitlines()[0]] += 1


def groups(found: Iterable[tuple[Row, Predicted]]) -> list[dict[str, Any]]:
    """The scores of all groups."""
    sorted_in: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row, made in found:
        if row.seconds is not None:
            sorted_in[row.file, row.group].append((row.seconds, made.seconds))
    return [
        {"file": file, "group": group, **asdict(score(*zip(*pairs, strict=True)))}
        for (file, group), pairs in sorted_in.items()
    ]


def memory_scores(found: Iterable[tuple[Row, Predicted]]) -> list[dict[str, Any]]:
    """Errors of memory, and whether rows that did not fit are told, of each file that says it."""
    by_file: dict[str, list[tuple[Row, Predicted]]] = defaultdict(list)
    for row, made in found:
        by_file[row.file].append((row, made))
    scores = []
    for file, every in by_file.items():
        errors = [
            abs((made.memory - row.allocated * made.reserve) / row.memory - 1)
            for row, made in every
            if row.memory
        ]
        told = [bool(row.out_of_memory) for row, _ in every]
        scores.append(
            {
                "file": file,
                "rows": len(errors),
                "mean_error": fmean(errors) if errors else None,
                "median_error": median(errors) if errors else None,
                "out_of_memory": sum(told),
                "f1": f1(told, [not made.fits for _, made in every]) if any(told) else None,
            }
        )
    return scores


def summary(scores: Sequence[dict[str, Any]]) -> str:
    """A line for each file: over its rows the error, over its groups the rest."""
    lines = []
    for file in dict.fromkeys(one["file"] for one in scores):
        own = [one for one in scores if one["file"] == file]
        ranked = [one["spearman"] for one in own if one["spearman"] is not None and one["rows"] > 4]
        rows = sum(one["rows"] for one in own)
        mean = sum(one["mean_error"] * one["rows"] for one in own) / rows
        said = f"spearman mean {fmean(ranked):.3f} median {median(ranked):.3f}" if ranked else ""
        lines.append(
            f"{file}: {rows} rows, {len(own)} groups, mean error {mean:.1%}, "
            f"median of groups {median(one['median_error'] for one in own):.1%}, {said}, "
            f"regret mean {fmean(one['regret'] for one in own):.1%}"
        )
    return "\n".join(lines)


def row_text(row: Row, made: Predicted) -> str:
    """A row's measured and predicted seconds, in a line."""
    where = f"dp{row.data} tp{row.tensor} pp{row.pipeline} mb{row.sequences}x{row.micro_batches}"
    error = f"{made.seconds / row.seconds - 1:+.1%}" if row.seconds else "no time"
    measured = f"measured {row.seconds}, predicted {made.seconds:.3f} s, {error}"
    return f"{row.file} {row.id} {row.group} {where}: {measured}, {made.memory / 2**30:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--published", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sample", type=int, help="so many rows of each file, drawn; all without")
    parser.add_argument("--rows", action="store_true", help="print every row")
    o = parser.parse_args()
    left_out: LeftOut = Counter()
    rows = list(told_rows(o.published, left_out))
    if o.sample:
        by_file: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_file[row.file].append(row)
        draw = Random(0)
        rows = [
            row for own in by_file.values() for row in draw.sample(own, min(o.sample, len(own)))
        ]
    found = []
    for row, made in predictions(rows, left_out):
        found.append((row, made))
        if o.rows:
            print(row_text(row, made), flush=True)
    scores, memory = groups(found), memory_scores(found)
    for (file, reason), count in left_out.items():
        print(f"{file}: {count} rows left out: {reason}")
    print(summary(scores))
    for one in memory:
        if one["rows"] or one["f1"] is not None:
            print(f"memory: {one}")
    if o.json:
        reasons = [
            {"file": file, "reason": reason, "rows": count}
            for (file, reason), count in left_out.items()
        ]
        content = {"groups": scores, "memory": memory, "left_out": reasons}
        o.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
