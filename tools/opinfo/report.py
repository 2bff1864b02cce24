"""docs/ops.md: the score, what splits, and a line for each op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tools.opinfo.check import Effort, OpReport
from tools.opinfo.eager_report import TITLE
from tools.opinfo.splitting import Splitting
from tools.scores.stamp import Stamp
from weft.ops import registered_ops

CLASSES = ("right", "shape", "partly", "refused", "wrong")
KINDS = ("splits", "in part", "whole", "nothing")
COMMAND = "python -m tools.opinfo"
SOURCES = ("src/weft", "tools/opinfo", "tools/oracles")
HEAD = """# Ops

Whether weft runs an op, and along which dimensions the op can be split.

Which ops weft runs, and what it splits of them, checked against PyTorch's OpInfo database (`op_db`, float32).

{stamp}

## Comparisons

For each op up to {effort.samples} samples, first those of new shapes. Samples that plain torch refuses are left out.

- **By an interpreter**, all of them: values and gradients are captured as one graph, run on one rank and compared
  with plain torch. Then inputs are laid out in up to {effort.layouts} ways: on the grid (4,) all split along their
  first dimension, or one of them split along some dimension or given as a sum; on (2, 2) and (1, 4) two of these at
  once; which ones is drawn. Uneven and empty shards are among them. Deduction, boxing and localizing are weft's; then
  one thread runs the calls of all ranks in turn.
- **By the runtime**, the first {effort.programs}: `weft.compile` makes a plan for four ranks, threads of this process,
  and actors, channels and kernels run it: on a line of ranks with all inputs split along their first dimension, and
  on a square along dimensions that are drawn.
- **Each call by itself**: every signature that a rule declares runs on the shards of 4 ranks and of 2 × 2, empty ones
  included, every kernel on operands that lie otherwise in memory (transposed, sliced, expanded, channels last), and
  every decomposition beside the kernel that it stands for, on ties, zeros and indices of -1 too.

Equal is: shapes and dtypes; numbers up to 1e-3 of each element, or 1e-3 of the largest element, or 1e-3, whichever is
most; whole numbers and booleans exactly. So elements below 1e-3 are not told from zero. Where summands of a sum are
infinite or nan, its elements are not compared. Random ops draw by position: their numbers are compared with weft's own
on one rank, and with plain torch's in shape and dtype only.

| class | ops | means |
|---|---|---|
| right | {right} | all samples equal plain torch in all layouts |
| shape | {shape} | random and uninitialized ops: all samples equal plain torch in shape and dtype |
| partly | {partly} | some samples are refused with a clear error, the others are right |
| refused | {refused} | all samples are refused with a clear error |
| wrong | {wrong} | a value, a gradient or a shape differs, or a process crashes |
| all | {all} | |

{ran} runs of whole programs are among the comparisons.

## Splits

One input of a sample is split along one dimension over two ranks; all other inputs lie as they like, results stay as
they are made. It splits where no call of its values and gradients reads a value whole that was split: sums may be
reduced and pieces exchanged, but nothing is gathered (deduction is told that gathers are very dear, as samples are so
small that it would take them). Dimensions of one element, and samples with empty tensors, do not count.

| | ops | of them right or shape | means |
|---|---|---|---|
{kinds}

{rules} ATen ops have rules; `weft ops` lists them. Every other one without a rule runs whole.

## Each op

*splits* counts samples that split along some dimension. *along* says for each input, `x0` the first, along which
dimensions some sample splits; those in brackets only gather. *sums* are inputs that may arrive as sums which nobody
reduced. *whole* are the ATen ops that read what was gathered, for some dimension.
"""
MEANS = {
    "splits": "every sample splits along some dimension",
    "in part": "some samples split, others gather along all their dimensions",
    "whole": "every sample gathers, along all its dimensions",
    "nothing": "no sample has an input with a dimension to split",
}


def totals(reports: Sequence[OpReport]) -> dict[str, int]:
    """How many ops are in each class."""
    found = Counter(report.verdict for report in reports)
    return {name: found[name] for name in CLASSES} | {"all": len(reports)}


def summary(reports: Sequence[OpReport]) -> str:
    """The totals in one line."""
    kinds = Counter(report.splitting.kind for report in reports)
    counts = {**totals(reports), **{kind: kinds[kind] for kind in KINDS}}
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def page(reports: Sequence[OpReport], effort: Effort, stamp: Stamp) -> str:
    """The text of docs/ops.md."""
    head = HEAD.format(
        stamp=stamp,
        effort=effort,
        ran=sum(report.ran for report in reports),
        rules=sum(not op.startswith("test.") for op in registered_ops()),
        kinds="\n".join(_kind(reports, kind) for kind in KINDS),
        **totals(reports),
    )
    lines = [head, "| op | class | samples right | splits | along | sums | whole | why |"]
    lines += ["|---" * 8 + "|"]
    lines += [line(report) for report in sorted(reports, key=_order)]
    return "\n".join(lines) + "\n"


def write_page(path: Path, reports: Sequence[OpReport], effort: Effort, stamp: Stamp) -> None:
    """Write docs/ops.md, but for its section on eager tensors, which stays."""
    _, title, eager = (path.read_text() if path.exists() else "").partition(TITLE)
    path.write_text(page(reports, effort, stamp) + (f"\n{title}{eager}" if title else ""))


def line(report: OpReport) -> str:
    """The line of an op."""
    every = report.right + sum(report.refused.values()) + len(report.wrong)
    why = "; ".join([*report.wrong[:1], *report.refused][:2]).replace("|", "\\|")
    cells = [f"`{report.name}`", report.verdict, f"{report.right} of {every}"]
    return f"| {' | '.join([*cells, *splits(report.splitting), why])} |"


def splits(found: Splitting) -> tuple[str, str, str, str]:
    """The cells of an op about what splits."""
    along = []
    for key in sorted({key for key, _ in found.along}):
        dims = sorted(
            (dim, counts[0] > 0) for (own, dim), counts in found.along.items() if own == key
        )
        along.append(f"{key} " + " ".join(f"{dim}" if good else f"({dim})" for dim, good in dims))
    gathered = [name.removeprefix("aten.").removesuffix(".default") for name in found.gathered]
    count = f"{found.split} of {found.samples}" if found.samples else ""
    return count, ", ".join(along), " ".join(sorted(found.partial)), " ".join(sorted(gathered)[:3])


def _kind(reports: Sequence[OpReport], kind: str) -> str:
    own = [report for report in reports if report.splitting.kind == kind]
    right = sum(report.verdict in ("right", "shape") for report in own)
    return f"| {kind} | {len(own)} | {right} | {MEANS[kind]} |"


def _order(report: OpReport) -> tuple[int, str]:
    """What is not right stands first, the worst before all."""
    bad = CLASSES.index(report.verdict) if report.verdict not in ("right", "shape") else 0
    return -bad, report.name
