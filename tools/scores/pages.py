"""The pages of scores: by which commands their stamps say that they were made, and how rows are found again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tools.scores import samples
from tools.scores.age import COMMITS, COMMITS_OF_AN_HOUR
from tools.scores.stamp import ROOT

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
