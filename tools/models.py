"""Train whole models under every strategy and write what equals plain PyTorch to docs/models.md.

python -m tools.models              all models: the families of `transformers` and the papers' (many minutes)
python -m tools.models llama nmt    these only; the other rows of the page stay
python -m tools.models --without "resnet-*/float32*" "resnet-101/tensor, ?"
                                    all but these cells, named as model/column; the page says "–" there
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made from configs

import torch

from tools import huggingface_models, paper_models
from tools.model_cases import (
    DECAY,
    EPS,
    FLOOR,
    LOSS_UNIT,
    MICRO_BATCHES,
    RATE,
    SHAKEN,
    STEPS,
    Case,
    Comparison,
    Difference,
    settings,
)
from tools.scores.stamp import Stamp, stamp_now, stamps_of

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
LIMIT, SINGLE_LIMIT = 1e-9, 10.0
BLOW_UP = 10
COMMAND = "python -m tools.models"
SOURCES = (
    *("src/weft", "examples/models", "tools/models.py", "tools/model_cases.py"),
    *("tools/huggingface_models.py", "tools/paper_models.py"),
)
# Of the strategies, those that train in float32, too.
SINGLE = ("data, 4", "hybrid, 2×2", "pipeline × data, 2×2")
# Cells of "automatic" that are those of data parallel, bit for bit.
AS_DATA = "as data"
# Cells that the last run left out, as `--without` says.
LEFT_OUT = "–"
HEAD = f"""# Models

Whole models that weft trains like plain PyTorch, and under which strategies.

{{stamp}}

Each model trains {STEPS} steps with AdamW (rate {RATE:g}, weight decay {DECAY:g}), alone with plain PyTorch and with
weft on 2 and 4 ranks, threads of one process.

- *float64*: eps is {EPS[torch.float64]:g} in both, not torch's default, as some gradients are zero but for rounding,
  which Adam would divide by itself. A cell is the larger of two differences: of the losses, relative, and of all
  parameters and buffers after the last step, each relative to the largest element of its tensor or to {FLOOR:g},
  whichever is more. Up to {LIMIT:g} is equal; for nets that blow rounding up, up to {BLOW_UP} times what a relative
  change of the batch by 1e-15 does to plain PyTorch's own result: a cell above {LIMIT:g} says up to how much. The order
  of sums is all that may differ.
- *float32*: eps is torch's default, {EPS[torch.float32]:g}, in both. A cell is the larger of two distances from plain
  PyTorch in float32, that of all parameters and buffers and that of losses, each in units of the largest distance that
  plain PyTorch in float32 has from itself in float64, as it is and {SHAKEN} times from weights that are rounded
  otherwise (of {LOSS_UNIT:.0e} of a loss at least): Adam takes a whole step by the sign of a gradient that is zero but
  for rounding. Up to {SINGLE_LIMIT:g} is equal.
- *data*: the batch split; *tensor*: the batch whole, the linear layers (experts, tables, heads) that
  `examples/models/` names split as Megatron-LM does; *hybrid*: both, on two axes; *automatic*: all deduced. Where that
  comes to data parallel, differing by as much to the last digit, it says "{AS_DATA}" and is not counted; nor is
  "{LEFT_OUT}", which was not run.
- *pipeline*: two stages of even cost, the batch split over the ranks of each, in {MICRO_BATCHES} micro-batches. Nets
  with BatchNorm are compared with gradients that accumulate over the same ones, as each takes its own statistics.
- Models are tiny, built from their configs. Models of `transformers` are taken as they are; in float64 what they cast
  to float32 is cast to float64. Dropout is off: plain PyTorch draws other numbers. Mixtures of experts run grouped
  products, the default of `transformers`, by its own op, since torch's takes no float64; "eager" reads values and is
  refused.
"""


def cases() -> dict[str, Case]:
    """All models by name."""
    return {**huggingface_models.CASES, **paper_models.CASES}


def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of each model on an earlier page."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def columns() -> list[str]:
    """The heads of the cells of a model."""
    return [*settings({}), *(f"float32: {name}" for name in SINGLE)]


def page_of(rows: Mapping[str, list[str]], stamp: Stamp) -> str:
    """The whole page; models stand in the order of `cases`."""
    cells = [cell for row in rows.values() for cell in row]
    counted = [cell for cell in cells if cell not in (AS_DATA, LEFT_OUT)]
    as_data = cells.count(AS_DATA)
    equal = sum(not cell.startswith("**") for cell in counted)
    table = [["model", *columns()], ["---"] * (1 + len(columns()))]
    table += [[name, *rows[name]] for name in cases() if name in rows]
    lines = [f"| {' | '.join(row)} |" for row in table]
    left_out = cells.count(LEFT_OUT)
    count = (
        f"Equal: {equal} of {len(counted)}; {as_data} more are data parallel under another name, "
        f"{left_out} were not run."
    )
    return "\n".join([HEAD.format(stamp=stamp), count, "", *lines, ""])


def cell_of(found: Difference, limit: float) -> str:
    """The larger difference, with the limit where it is above the usual one; bold when it is above `limit`."""
    worst = max(found.loss, found.state)
    if worst > limit:
        return f"**{worst:.1e} > {limit:.1e} ({found.worst})**"
    return f"{worst:.0e}" if worst <= LIMIT else f"{worst:.1e} ≤ {limit:.1e}"


def compare(
    name: str, case: Case, only: Collection[str] = (), without: Sequence[str] = ()
) -> dict[str, str]:
    """The cells of one model by the heads of their columns.

    Args:
        name, case: the model.
        only: of these columns; of all where there are none.
        without: patterns of model/column that are not run.
    """
    comparison, row = Comparison(case), dict[str, str]()
    found: dict[str, Difference] = {}

    def double(strategy: str) -> str:
        grid, chosen = settings(case.layouts)[strategy]
        limit = max(LIMIT, BLOW_UP * comparison.rounding(chosen))
        found[strategy] = comparison.difference(grid, chosen)
        beside = found.get(strategy.replace("automatic", "data"))
        as_data = strategy.startswith("automatic") and found[strategy] == beside
        return AS_DATA if as_data else cell_of(found[strategy], limit)

    def single(strategy: str) -> str:
        moved = comparison.single(*settings(case.layouts)[strategy])
        return f"{moved:.2g}" if moved <= SINGLE_LIMIT else f"**{moved:.2g}**"

    for column in columns():
        if only and column not in only:
            continue
        if any(fnmatchcase(f"{name}/{column}", pattern) for pattern in without):
            row[column] = LEFT_OUT
            continue
        kind, _, strategy = column.rpartition(": ")
        try:
            row[column] = single(strategy) if kind else double(strategy)
        except Exception as error:
            row[column] = f"**{type(error).__name__}**"
            print(f"{name}, {column}: {error}", flush=True)
        print(f"{name:14} {column:24} {row[column]}", flush=True)
    return row


def main(arguments: Sequence[str]) -> int:
    """Compare the named models, or all. Returns the number of cells that are not equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--without", nargs="+", default=[], metavar="PATTERN")
    told = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    names, every = told.names, cases()
    if unknown := [name for name in names if name not in every]:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(every)}")
    places = [f"{name}/{column}" for name in names or every for column in columns()]
    for pattern in told.without:
        if not any(fnmatchcase(place, pattern) for place in places):
            parser.error(f"no cell is called {pattern}; one is {places[0]!r}")
    different, rows = 0, dict[str, list[str]]()
    stamp = stamp_now(COMMAND, SOURCES)
    if names:  # a page of rows of several times is as old as the oldest
        (stamp, *_), rows = stamps_of(PAGE.read_text()), rows_of(PAGE.read_text())
    for name in names or every:
        rows[name] = list(compare(name, every[name], without=told.without).values())
        different += sum(cell.startswith("**") for cell in rows[name])
        PAGE.write_text(page_of(rows, stamp))
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
