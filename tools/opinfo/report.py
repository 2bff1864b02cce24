"""docs/ops.md: the score, the reasons of refusals, and a line for each op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.opinfo.check import OpReport
from tools.opinfo.eager_report import TITLE
from weft.ops import registered_ops

CLASSES = ("right", "partly", "refused", "wrong")
HEAD = """# Ops

Which ops weft runs, checked against PyTorch's OpInfo database (`op_db`, float32, torch {version}). Made by

```console
python -m tools.opinfo
```

For each op, up to {samples} samples. Values and gradients are captured as one graph, run on one rank and compared with
plain torch. Every signature that a rule declares for a call in that graph runs on the shards of 4 ranks and of 2 × 2,
empty ones included, and every kernel on operands that lie otherwise in memory: transposed, sliced, expanded, with
channels last. Every decomposition that capture takes is compared with the kernel that it stands for, on ties, zeros
and indices of -1 too.
Then the inputs are laid out in up to {layouts} ways on the grids (4,), (2, 2) and (1, 4): split along every
dimension, uneven and empty shards included, and as sums; deduction and boxing do the rest; all ranks' results are
compared. Random ops are compared with themselves on one rank, as weft draws numbers by position. Where summands of
a Partial result are infinite or nan, its elements are not compared. Samples that plain torch refuses are left out.

| class | ops | means |
|---|---|---|
| right | {right} | all samples equal plain torch in all layouts |
| partly | {partly} | some samples are refused with a clear error, the others are right |
| refused | {refused} | all samples are refused with a clear error |
| wrong | {wrong} | a value, a gradient or a shape differs, or a process crashes |
| all | {all} | |

{rules} ops have rules; `weft ops` lists them. Every other ATen op without a rule runs whole: its operands are gathered
and every rank computes the whole result.
"""


def totals(reports: Sequence[OpReport]) -> dict[str, int]:
    """How many ops are in each class."""
    found = Counter(report.verdict for report in reports)
    return {name: found[name] for name in CLASSES} | {"all": len(reports)}


def summary(reports: Sequence[OpReport]) -> str:
    """The totals in one line."""
    return ", ".join(f"{count} {name}" for name, count in totals(reports).items())


def page(reports: Sequence[OpReport], samples: int, layouts: int) -> str:
    """The text of docs/ops.md."""
    version = torch.__version__.split("+")[0]
    rules = sum(not op.startswith("test.") for op in registered_ops())
    head = HEAD.format(
        version=version, samples=samples, layouts=layouts, rules=rules, **totals(reports)
    )
    rest = [report for report in reports if report.verdict != "right"]
    lines = [
        head,
        "## Not fully right",
        "",
        "| op | class | samples right | why |",
        "|---|---|---|---|",
    ]
    lines += [_line(report) for report in sorted(rest, key=_order)]
    lines += ["", "## Fully right", ""]
    right = sorted(report.name for report in reports if report.verdict == "right")
    lines.append(", ".join(f"`{name}`" for name in right) + ".")
    return "\n".join(lines) + "\n"


def write_page(path: Path, reports: Sequence[OpReport], samples: int, layouts: int) -> None:
    """Write docs/ops.md, but for its section on eager tensors, which stays."""
    _, title, eager = (path.read_text() if path.exists() else "").partition(TITLE)
    path.write_text(page(reports, samples, layouts) + (f"\n{title}{eager}" if title else ""))


def _order(report: OpReport) -> tuple[int, str]:
    return -CLASSES.index(report.verdict), report.name


def _line(report: OpReport) -> str:
    every = report.right + sum(report.refused.values()) + len(report.wrong)
    why = "; ".join([*report.wrong[:1], *report.refused][:2]).replace("|", "\\|")
    return f"| `{report.name}` | {report.verdict} | {report.right} of {every} | {why} |"
