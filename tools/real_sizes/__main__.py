"""Plan real models at published sizes and compare each plan with the textbook.

python -m tools.real_sizes                       every row (many minutes)
python -m tools.real_sizes --short               a few rows of every kind, a minute
python -m tools.real_sizes --only "Llama 3 8B*"  rows whose names match; may be repeated
python -m tools.real_sizes --page FILE           the table as a page

Nothing runs and nothing is downloaded. Exits with 1 when a row fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made from configs

from tools.real_sizes.page import COMMAND, SOURCES, line_of, page_of
from tools.real_sizes.rows import all_rows, short_rows
from tools.real_sizes.run import Result, results
from tools.scores.stamp import stamp_now


def main(arguments: list[str]) -> int:
    """Plan the rows that were asked for; the exit code tells whether one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", action="append", metavar="PATTERN")
    parser.add_argument("--page", type=Path, metavar="FILE")
    told = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows = short_rows() if told.short else all_rows()
    found: list[Result] = []
    stamp = stamp_now(COMMAND, SOURCES)
    patterns = told.only or ["*"]
    chosen = [row for row in rows if any(fnmatchcase(row.name, each) for each in patterns)]
    for result in results(chosen):
        found.append(result)
        print(line_of(result), flush=True)
        if told.page:
            told.page.write_text(page_of(found, stamp))
    failed = sum(result.fails for result in found)
    print(
        f"{len(found) - failed} of {len(found)} plans are as the textbook says, or better, or explained"
    )
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
