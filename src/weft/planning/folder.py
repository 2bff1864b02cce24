"""A folder with the text of a plan: of one rank of each class of equal ranks, and who is in which class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from weft.atomic_files import cannot_write
from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.ir.plan import Communicate, Plan
from weft.traces.events import joined_notes
from weft.units import bytes_text, counted

_OURS = re.compile(r"rank_\d+\.txt|classes\.txt|summary\.txt")


def write_plan(compiled: Compiled, title: str, folder: Path) -> str:
    """Write the plan of a rank of each class, the classes and a summary; returns the summary.

    Args:
        compiled: for one rank of each class.
        title: of the summary: what was planned, where.
        folder: is made; files of an earlier plan in it are replaced.

    Raises:
        UserError: when the folder holds anything else, or cannot be written.
    """
    members: dict[int, list[int]] = {}
    for rank, first in compiled.schedule.classes.items():
        members.setdefault(first, []).append(rank)
    classes = {first: tuple(ranks) for first, ranks in sorted(members.items())}
    summary = summary_of(compiled, title, classes)
    texts = dict[str, str]()
    for plan in compiled.plan.ranks:  # with the communicators that it uses
        acts = (actor for actor in plan.actors if isinstance(actor, Communicate))
        used = {exchange.communicator for act in acts for exchange in act.collectives}
        groups = tuple(each for each in compiled.plan.communicators if each.id in used)
        texts[f"rank_{plan.rank}.txt"] = str(Plan(compiled.plan.name, groups, (plan,)))
    texts["classes.txt"] = "".join(
        f"rank {first} stands for {len(ranks)}: {ranges(ranks)}\n"
        for first, ranks in classes.items()
    )
    texts["summary.txt"] = summary
    try:
        _emptied(folder)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(cannot_write(folder, "the plan", error)) from None
    return summary


def summary_of(compiled: Compiled, title: str, classes: Mapping[int, tuple[int, ...]]) -> str:
    """The size of a plan, in lines."""
    peaks = {peak.rank: peak for peak in compiled.peaks}
    stages, ranks = len(compiled.stages.placements), sum(map(len, classes.values()))
    equal = f"{counted(ranks, 'rank')} in {counted(len(classes), 'class', 'classes')} of equal ones"
    lines = [title, f"{counted(stages, 'stage')}, {equal}"]
    for plan in compiled.plan.ranks:
        sends = sum(isinstance(actor, Communicate) for actor in plan.actors)
        peak = peaks[plan.rank]
        lines.append(
            f"rank {plan.rank} (of {len(classes[plan.rank])}): {len(plan.actors)} actors, {sends} of them communicate; "
            f"{bytes_text(peak.memory.peak)} at its peak"
        )
    lines += [f"schedule: {compiled.schedule.name}", *joined_notes(compiled.notes)]
    return "".join(f"{line}\n" for line in lines)


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in order, in short: "0-3, 8"."""
    every = sorted(numbers)
    breaks = [0, *(i for i, (a, b) in enumerate(pairwise(every), 1) if b > a + 1), len(every)]
    runs = (every[start:end] for start, end in pairwise(breaks) if end > start)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _emptied(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(folder.iterdir())
    foreign = [path.name for path in there if not _OURS.fullmatch(path.name)]
    if foreign:
        raise UserError(
            f"the folder {folder} holds {foreign[0]!r}, which is no part of a plan; give a folder that is empty or "
            "not there"
        )
    for path in there:
        path.unlink()
