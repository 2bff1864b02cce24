"""The pages of scores: by which commands they were made, how rows are found again, and how old a page may be.

Where its sources are as they were a page never ages, otherwise it does by days and commits.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import final

from tools.scores import samples
from tools.scores.stamp import ROOT, Stamp, contents, digest, stamps_of

DAYS = 60
# Commits that may change the sources of a page: of one that takes hours to renew, and of one that an hour renews.
COMMITS, COMMITS_OF_AN_HOUR = 800, 300

Sampler = Callable[[str, random.Random], Iterator[samples.Found]]


@final
@dataclass(frozen=True)
class Page:
    """A page with scores.

    Attributes:
        name: of the file, below docs/.
        commands: those that its stamps name; each makes a part of it anew.
        samplers: each draws rows of its text and finds them again.
        commits: that may change its sources before it is old.
    """

    name: str
    commands: tuple[str, ...]
    samplers: tuple[Sampler, ...]
    commits: int = COMMITS

    @property
    def path(self) -> Path:
        return ROOT / "docs" / self.name


PAGES = (
    Page(
        "ops.md",
        ("python -m tools.opinfo", "python -m tools.opinfo --eager"),
        (samples.ops, samples.eager_ops),
        COMMITS_OF_AN_HOUR,
    ),
    Page("models.md", ("python -m tools.models",), (samples.models,), COMMITS_OF_AN_HOUR),
    Page(
        "combinations.md",
        ("python -m tools.combinations",),
        (samples.combinations,),
        COMMITS_OF_AN_HOUR,
    ),
    Page("benchmarks.md", ("make bench",), (samples.benchmarks,)),
    Page(
        "real_sizes.md",
        ("python -m tools.real_sizes --page docs/real_sizes.md",),
        (samples.real_sizes,),
        COMMITS_OF_AN_HOUR,
    ),
    Page(
        "random_programs.md",
        ("python -m tools.random_programs",),
        (samples.programs,),
        COMMITS_OF_AN_HOUR,
    ),
    Page("accuracy.md", ("make accuracy",), ()),
    Page("search.md", ("make search-bench",), (samples.search,)),
)


def complaints(
    text: str, commands: tuple[str, ...], root: Path, today: date, commits: int = COMMITS
) -> Iterator[str]:
    """What is wrong with the stamps of a page, a line each.

    Args:
        text: of the page.
        commands: that its stamps have to name, each once.
        root: of the tree.
        today: to which days are counted.
        commits: that may have changed the sources.
    """
    stamps = {stamp.command: stamp for stamp in stamps_of(text)}
    for command in commands:
        if command not in stamps:
            yield f"no line says when `{command}` made it: run it, or `python -m tools.scores --help`"
        elif is_changed(stamps[command], root):
            yield from _old(stamps[command], root, today, commits)


def is_changed(stamp: Stamp, root: Path) -> bool:
    """Whether one of the sources is another than when the page was made."""
    there = all((root / source).exists() for source in stamp.sources)
    return not there or digest(contents(root, stamp.sources)) != stamp.digest


def _old(stamp: Stamp, root: Path, today: date, allowed: int) -> Iterator[str]:
    days, commits = (today - stamp.day).days, commits_since(stamp, root)
    how = f"`{stamp.command}` renews it, `make scores` all pages"
    if days > DAYS:
        yield f"its sources have changed, and it is {days} days old, more than {DAYS}: {how}"
    elif commits > allowed:
        yield f"{commits} commits have changed its sources, more than {allowed}: {how}"


def commits_since(stamp: Stamp, root: Path) -> int:
    """Commits after the stamp's day that changed its sources; 0 where there is no history."""
    since = f"--since={stamp.day.isoformat()} 23:59:59"
    command = ["git", "rev-list", "--count", since, "HEAD", "--", *stamp.sources]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return int(told.stdout) if told.returncode == 0 else 0
