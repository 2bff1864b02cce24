"""Checkpoints of a run: one folder with a checkpoint each few steps, of which the newest are kept."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, final

from weft.errors import DamagedCheckpoint, UserError
from weft.program.saving.manifest import PARTIAL, REPLACED, put_back, read_manifest
from weft.program.saving.save import EXTRA

_log = logging.getLogger("weft")
_PREFIX = "step-"
SCORE = "score"


class Saving(Protocol):
    """A program, as far as its checkpoints go."""

    @property
    def steps(self) -> int:
        """The number of steps that it has made."""

    @property
    def is_first(self) -> bool:
        """True in the process that writes for all."""

    @property
    def exchange(self) -> Callable[[str], list[str]] | None:
        """Gives the texts of all processes; None where this is the only one."""

    def wait_for_saved(self) -> None:
        """Wait until the last checkpoint is written."""

    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        replace: bool = False,
    ) -> None:
        """Write a checkpoint."""

    def load(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Go on from a checkpoint."""


@final
@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, each in a folder "step-00001000" of one folder.

    Attributes:
        path: the folder, on a file system that all processes see.
        every: how many steps lie between two that `save_when_due` writes.
        keep: how many of the newest stay; those before are taken away. The one of the least score stays, too.
        wait: False goes on as soon as all is copied, as `Program.save` does; one more may stay then.
        score: of the figures of `weft.fit`, the one that is best where it is least.
    """

    path: str | Path
    every: int = 1000
    keep: int = 3
    wait: bool = True
    score: str | None = None

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"weft.Checkpoints: {name} takes a number from 1, found {value!r}")
        if not isinstance(self.wait, bool):
            raise UserError(f"weft.Checkpoints: wait takes True or False, found {self.wait!r}")
        if self.score is not None and not isinstance(self.score, str):
            raise UserError(
                f"weft.Checkpoints: score takes the name of a figure, found {self.score!r}"
            )
        if not isinstance(self.path, str | Path) or not str(self.path):
            raise UserError(f"weft.Checkpoints: path takes a folder, found {self.path!r}")

    @property
    def folder(self) -> Path:
        """The path, from the root."""
        return Path(self.path).absolute()

    def save(
        self, program: Saving, extra: Mapping[str, Any] | None = None, score: float | None = None
    ) -> Path:
        """Save a program under the number of its steps, in place of one of as many. Every process must call it.

        Args:
            program: that trains.
            extra: as `Program.save` takes it.
            score: the least is the best, as of a validation loss; it stands among the extras as "score", which no other
                extra may be called.

        Returns:
            The folder of the checkpoint.

        Raises:
            UserError: as `Program.save` does.
        """
        place = self.folder / f"{_PREFIX}{program.steps:08d}"
        if score is not None and not isinstance(score, Real):
            raise UserError(f"weft.Checkpoints: score takes a number, found {score!r}")
        check_names(extra, (SCORE,), "the score of a checkpoint stands")
        scored: dict[str, float] = {} if score is None else {SCORE: float(score)}
        program.wait_for_saved()
        if program.is_first:
            self._clear()
        # A run that went on from an earlier one may come here again, as after damage.
        program.save(place, {**(extra or {}), **scored}, self.wait, replace=True)
        if program.is_first:
            self._take_away()
        return place

    def save_when_due(
        self, program: Saving, extra: Mapping[str, Any] | None = None, score: float | None = None
    ) -> Path | None:
        """Save a program after every so many steps; None after the others. Every process must call it."""
        due = program.steps > 0 and program.steps % self.every == 0
        return self.save(program, extra, score) if due else None

    def load_newest(
        self, program: Saving, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Let a program go on from the newest checkpoint that is whole. Every process must call it.

        One that is damaged, or was never whole, is named in a warning, and the one before is taken.

        Returns:
            What `Program.load` returns; None where there is no checkpoint yet.

        Raises:
            UserError: all are damaged; or the newest that is whole is of another model, or lacks an extra.
        """
        errors: list[str] = []
        program.wait_for_saved()
        if program.is_first:
            self._put_back()
        names = [each.name for each in self.all()]
        if program.exchange is not None:
            names = json.loads(program.exchange(json.dumps(names))[0])
        for name in reversed(names):
            try:
                return program.load(self.folder / name, extra)
            except DamagedCheckpoint as error:
                errors.append(str(error))
                _log.warning("%s; trying the one before", error)
        if errors:
            raise UserError(
                f"no checkpoint in {self.folder} can be loaded; give a folder of whole ones: {errors[0]}"
            )
        return None

    def all(self) -> list[Path]:
        """The folders of the checkpoints that are there, in the order of their steps."""
        found = self.folder.glob(f"{_PREFIX}*") if self.folder.is_dir() else ()
        numbers = ((each.name.removeprefix(_PREFIX), each) for each in found)
        return [
            each
            for _, each in sorted((int(n), x) for n, x in numbers if n.isascii() and n.isdigit())
        ]

    def _clear(self) -> None:
        """Take away what runs that were ended while they wrote have left."""
        self._put_back()
        for suffix in (PARTIAL, REPLACED):
            for each in self.folder.glob(f".{_PREFIX}*{suffix}"):
                shutil.rmtree(each, ignore_errors=True)

    def _put_back(self) -> None:
        """Put a checkpoint in its place again that another was about to replace when the run was ended."""
        for each in self.folder.glob(f".{_PREFIX}*{REPLACED}"):
            put_back(self.folder / each.name.split(".")[1])

    def _take_away(self) -> None:
        every = self.all()
        best = min(((s, each) for each in every if (s := _score(each)) is not None), default=None)
        for each in every[: -self.keep]:
            if best is None or each != best[1]:
                shutil.rmtree(each, ignore_errors=True)


def check_names(extra: object, taken: Iterable[str], why: str) -> None:
    """Refuse extras of the user's under names that weft takes for its own.

    Raises:
        UserError: naming the first of them.
    """
    for name in taken:
        if isinstance(extra, Mapping) and name in extra:
            raise UserError(f"{why} among the extras as {name!r}; give yours another name")


def _score(place: Path) -> float | None:
    try:
        extra = read_manifest(place).about.get(EXTRA, {})
    except UserError:
        return None
    found = extra.get(SCORE) if isinstance(extra, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if abs(found) <= sys.float_info.max else None
