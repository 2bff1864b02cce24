"""The gate: pages of scores are not old, and a few of their rows, drawn anew each time, still hold.

python -m tools.scores                          a minute: all stamps, and rows until the time is over
python -m tools.scores --only ops.md            rows of this page
python -m tools.scores --seed 5                 the rows of that draw; what fails says its seed
python -m tools.scores --stamps                 how old each page is
python -m tools.scores --renewed accuracy.md "make accuracy"
                                                says on a page that is written by hand that this command made its
                                                figures now; `--at COMMIT` where it was at that commit

Rows are drawn by the commit; pages take turns in an order that is drawn too. What the time does not suffice for is
said, and no failure.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

from tools.scores.pages import PAGES, Page, complaints, is_changed
from tools.scores.samples import Found
from tools.scores.stamp import ROOT, contents_at, digest, restamped, stamp_now, stamps_of

# Seconds after which no further row is begun, and seconds of one row; the whole gate is to take a minute.
SECONDS = 35.0


def main(arguments: Sequence[str]) -> int:
    """Returns how many complaints there are, 1 at most."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.scores",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that rows may take")
    parser.add_argument("--seed", help="of the draw; by default the commit")
    parser.add_argument("--only", nargs="+", metavar="PAGE", help="names of pages")
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--renewed", nargs=2, metavar=("PAGE", "COMMAND"))
    parser.add_argument("--at", metavar="COMMIT")
    options = parser.parse_args(arguments)
    pages = [page for page in PAGES if not options.only or page.name in options.only]
    if options.renewed:
        name, command = options.renewed
        renewed(name, command, options.at)
        return 0
    if options.stamps:
        print("\n".join(line for page in pages for line in ages(page)))
        return 0
    seed = options.seed or this_commit()
    found = [*old(pages), *drifts(pages, seed, options.seconds)]
    print("\n".join(found))
    if found:
        print(f"repeat this draw with `python -m tools.scores --seed {seed}`")
    return int(bool(found))


def old(pages: Sequence[Page]) -> Iterator[str]:
    """Pages that are too old, or do not say what they were made from."""
    for page in pages:
        text = page.path.read_text()
        for line in complaints(text, page.commands, ROOT, date.today(), page.commits):
            yield f"docs/{page.name}: {line}"


def drifts(pages: Sequence[Page], seed: str, seconds: float) -> Iterator[str]:
    """Rows that are other now; prints which rows were found again, and which pages had no turn.

    Each sampler has a draw of its own, so that a seed gives the same rows whatever else has a turn.
    """
    end = time.monotonic() + seconds
    turns = [(page, sample) for page in pages for sample in page.samplers]
    random.Random(seed).shuffle(turns)
    found = {
        i: sample(page.path.read_text(), random.Random(f"{seed} {sample.__name__}"))
        for i, (page, sample) in enumerate(turns)
    }
    left = set(found)
    while found and time.monotonic() < end:
        for i in list(found):
            if time.monotonic() > end:
                break
            row = next_row(found[i])
            if row is None:
                del found[i]
                continue
            left.discard(i)
            print(f"{turns[i][0].name}: {row[0]} {'is other' if row[1] else 'holds'}", flush=True)
            if row[1]:
                renew = " or ".join(f"`{command}`" for command in turns[i][0].commands)
                yield f"docs/{turns[i][0].name}: {row[0]}: {row[1]}\n  mend what changed it, or renew: {renew}"
    for i in sorted(left):
        print(f"{turns[i][0].name}: no turn this time ({turns[i][1].__name__})")


def next_row(rows: Iterator[Found]) -> Found | None:
    """The next row; an error is one that is other."""
    try:
        return next(rows, None)
    except Exception as error:  # of whatever finds the row again
        return "a row", f"{type(error).__name__}: {error}"


def ages(page: Page) -> Iterator[str]:
    """A line for each stamp of a page."""
    for stamp in stamps_of(page.path.read_text()):
        state = "sources have changed since" if is_changed(stamp, ROOT) else "sources are the same"
        yield f"{page.name}: {stamp.command}: {stamp.day}, torch {stamp.torch}: {state}"


def renewed(name: str, command: str, commit: str | None) -> None:
    """Say on a page that a command made its figures, now or at a commit; its sources stay those of the stamp."""
    (page,) = (page for page in PAGES if page.name == name)
    text = page.path.read_text()
    (sources,) = (one.sources for one in stamps_of(text) if one.command == command)
    stamp = stamp_now(command, sources)
    if commit:
        show = ["git", "show", "-s", "--format=%as", commit]
        day = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        made_from = digest(contents_at(commit, sources))
        stamp = replace(stamp, day=date.fromisoformat(day.strip()), digest=made_from)
    page.path.write_text(restamped(text, stamp))


def this_commit() -> str:
    """The commit that is checked out, or the day where there is none."""
    told = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or date.today().isoformat()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # ranks of a row that failed may still wait in threads
