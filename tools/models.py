"""Train whole models under every strategy and write what equals plain PyTorch to docs/models.md.

python -m tools.models              all models: the families of `transformers` and the papers' (many minutes)
python -m tools.models llama nmt    these only; the other rows of the page stay
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made from configs

from tools import huggingface_models, paper_models
from tools.model_cases import MICRO_BATCHES, STEPS, Case, Comparison, Difference, settings

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
LIMIT = 1e-9
BLOW_UP = 10
HEAD = f"""# Models

Written by `python -m tools.models`. Each model trains {STEPS} steps with AdamW in float64, alone with plain PyTorch and
with weft on 2 and 4 ranks in one process. A cell is the larger of two differences: of the losses, relative, and of all
parameters and buffers after the last step, relative to the largest element of each. Up to {LIMIT:g} is equal; for
nets that blow rounding up, up to {BLOW_UP} times what a relative change of the batch by 1e-15 does to plain PyTorch's
own result (ResNet-101: 2e-9). The order of floating-point sums is all that may differ.

- *data*: the batch split; *tensor*: the batch whole, the linear layers (experts, tables, heads) that
  `examples/models/` names split as Megatron-LM does; *hybrid*: both, on two axes; *automatic*: all deduced.
- AdamW has an eps of 1e-4, not 1e-8: gradients that are zero but for rounding it would divide by themselves. What is
  smaller than 1e-4 at its largest is compared with 1e-4.
- *pipeline*: two stages of even cost, the batch split over the ranks of each, in {MICRO_BATCHES} micro-batches. Nets
  with BatchNorm are compared with gradients that accumulate over the same ones, as each takes its own statistics.
- Models are tiny, built from their configs. Those of `transformers` are taken as they are; what they cast to float32 is
  cast to float64 here. Dropout is off: plain PyTorch draws other numbers. Mixtures of experts run grouped products,
  the default of `transformers`, by its own op, since torch's takes no float64; "eager" reads values and is refused.
"""


def cases() -> dict[str, Case]:
    """All models by name."""
    return {**huggingface_models.CASES, **paper_models.CASES}


def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of each model on an earlier page."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def page_of(rows: Mapping[str, list[str]], columns: list[str]) -> str:
    """The whole page; models stand in the order of `cases`."""
    cells = [cell for row in rows.values() for cell in row]
    equal = sum(not cell.startswith("**") for cell in cells)
    table = [["model", *columns], ["---"] * (1 + len(columns))]
    table += [[name, *rows[name]] for name in cases() if name in rows]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([HEAD, f"Equal: {equal} of {len(cells)}.", "", *lines, ""])


def cell_of(found: Difference, limit: float) -> str:
    """The larger difference; bold when it is above `limit`."""
    worst = max(found.loss, found.state)
    return f"{worst:.0e}" if worst <= limit else f"**{worst:.0e} ({found.worst})**"


def compare(name: str, case: Case) -> list[str]:
    """The cells of one model, in the order of the strategies."""
    comparison, row = Comparison(case), []
    for strategy, (grid, chosen) in settings(case.layouts).items():
        try:
            limit = max(LIMIT, BLOW_UP * comparison.rounding(chosen))
            row.append(cell_of(comparison.difference(grid, chosen), limit))
        except Exception as error:
            row.append(f"**{type(error).__name__}**")
            print(f"{name}, {strategy}: {error}", flush=True)
        print(f"{name:14} {strategy:14} {row[-1]}", flush=True)
    return row


def main(names: list[str]) -> int:
    """Compare the named models, or all. Returns the number of cells that are not equal."""
    warnings.simplefilter("ignore")
    every = cases()
    unknown = [name for name in names if name not in every]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(every)}")
        return 1
    different = 0
    for name in names or every:
        row = compare(name, every[name])
        rows = {**(rows_of(PAGE.read_text()) if PAGE.exists() else {}), name: row}
        PAGE.write_text(page_of(rows, list(settings({}))))
        different += sum(cell.startswith("**") for cell in row)
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
