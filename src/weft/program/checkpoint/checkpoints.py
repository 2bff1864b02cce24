"""Checkpoints of a run: one folder with a checkpoint each few steps, of which the newest are kept."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TextIO, final
from weakref import ReferenceType, ref

from weft.errors import DamagedCheckpoint, UserError, check, is_number, is_whole, wrong
from weft.program.checkpoint.extras import EXTRA
from weft.program.checkpoint.files import SUFFIX
from weft.program.checkpoint.manifest import (
    NAME,
    PARTIAL,
    REPLACED,
    checkpoint_path,
    may_go,
    put_back,
    read_manifest,
)
from weft.program.checkpoint.saving import ProgramSaving

# In a folder of checkpoints: the job that saves there has it open, and locked, and names itself in it.
LOCK = ".lock"


@final
class _Claim(NamedTuple):
    """A claim; the lock is the first process's, where the file system knows locks."""

    program: ReferenceType[ProgramSaving]
    lock: TextIO | None


_claims: dict[Path, _Claim] = {}


def claim_for_job(folder: Path, program: ProgramSaving) -> None:
    """Claim a folder for a program, and lock it for this job until the program is closed. Every process must call it.

    A file system that knows no locks is taken as it is. Raises UserError on every process, when another open program,
    or one of another job, saves there.
    """
    folder = folder.resolve()
    held = _claims.get(folder)
    other = None if held is None else held.program()
    if other is program or not program.is_open:
        return
    if other is not None:
        raise UserError(
            f"another open program saves to {folder}, and the two would mix up their checkpoints; give each program "
            "its own folder, or close the other program before"
        )
    lock, holder = _locked(folder) if program.is_first else (None, "")
    if program.exchange is not None:
        holder = program.exchange(holder)[0]
    if holder:
        raise UserError(
            f"{holder} saves to {folder}, and the two jobs would mix up their checkpoints; give each job its own "
            "folder, or end the other job before"
        )
    _claims[folder] = _Claim(ref(program, partial(_let_go, folder)), lock)


def give_up(program: ProgramSaving) -> None:
    """Let go of what a program has claimed."""
    for folder in [each for each, claim in _claims.items() if claim.program() is program]:
        _let_go(folder)


def is_of_another_job(folder: Path) -> bool:
    """True if another job saves to a folder, as far as its file system tells."""
    folder = folder.resolve()
    held = _claims.get(folder)
    if held is not None and held.lock is not None:
        return False
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        return not _take(lock)
    return False


def _locked(folder: Path) -> tuple[TextIO | None, str]:
    """The lock of a folder, or who has it. A folder that cannot be written to is for others to tell."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", errors="replace")
    except OSError:
        return None, ""
    if not _take(lock):
        with lock:
            lock.seek(0)
            return None, lock.read(200) or "another job"
    with suppress(OSError):  # a full disk; the checkpoint will say so
        lock.truncate(0)
        lock.write(f"process {os.getpid()} of host {socket.gethostname()}")
        lock.flush()
    return lock, ""


def _take(lock: TextIO) -> bool:
    """Take the lock of an open file; False if another process has it. True if there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _let_go(folder: Path, _: object = None) -> None:
    held = _claims.pop(folder, None)
    if held is not None and held.lock is not None:
        held.lock.close()


def _forked() -> None:
    """A process that was forked claims nothing, and its end must not keep a lock."""
    for folder in list(_claims):
        _let_go(folder)


os.register_at_fork(after_in_child=_forked)


_log = logging.getLogger("weft")
_PREFIX = "step-"
SCORE = "score"
# The files of a checkpoint beside its manifest.
_OWN = re.compile(r"(shard-\d+-model-\d+|extra(-\d+)?)\.safetensors|rank-\d+\.json")


@final
@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, each in a folder "step-00001000" of one folder.

    Attributes:
        path: the folder, on a file system that all processes see.
        every: the number of steps from one that `save_when_due` writes to the next.
        keep: how many of the newest stay; those before are taken away. The one of the least score stays, too.
        wait: False continues as soon as all is copied, as `Program.save` does; one more may stay then.
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
            if not is_whole(value, 1):
                raise wrong(f"weft.Checkpoints: {name}", "a number from 1", value)
        check(
            "weft.Checkpoints",
            (isinstance(self.wait, bool), "wait", "True or False", self.wait),
            (isinstance(self.score, str | None), "score", "the name of a figure", self.score),
            (
                isinstance(self.path, str | Path) and str(self.path) != "",
                "path",
                "a folder",
                self.path,
            ),
        )

    @property
    def folder(self) -> Path:
        """The path, from the root; "~" stands for the user's home.

        Raises:
            UserError: the system takes no such path.
        """
        return checkpoint_path(self.path)

    def save(
        self,
        program: ProgramSaving,
        extra: Mapping[str, Any] | None = None,
        score: float | None = None,
    ) -> Path:
        """Save a program under the number of its steps, in place of one of as many. Every process must call it.

        Args:
            extra: as `Program.save` takes it.
            score: the least is the best, as of a validation loss, and one that is not finite never is; that of the
                first process counts, and stands among the extras as "score", which no other extra may be called.

        Returns:
            The folder of the checkpoint.

        Raises:
            UserError: as `Program.save` does; another open program, or one of another job, saves to this folder.
        """
        _check_program(program)
        check_names(extra, (SCORE,), "the score of a checkpoint stands")
        if score is not None and (isinstance(score, bool) or not isinstance(score, Real)):
            raise wrong("weft.Checkpoints: score", "a number", score)
        # The first process's score counts, also where others have found another one.
        scored: dict[str, float] = (
            {SCORE: float(score)} if score is not None and program.is_first else {}
        )
        claim_for_job(self.folder, program)
        place = self.folder / f"{_PREFIX}{program.steps:08d}"
        program.wait_for_saved()
        if program.is_first:
            self._put_back()
            # Leftovers of runs that ended while they wrote.
            for suffix in (PARTIAL, REPLACED):
                for each in self.folder.glob(f".{_PREFIX}*{suffix}"):
                    shutil.rmtree(each, ignore_errors=True)
            _make_room(place)
        # A run that continued from an earlier one may come here again, as after damage.
        program.save(place, {**(extra or {}), **scored}, self.wait, True)
        if program.is_first:
            self._take_away(program.steps)
        return place

    def save_when_due(
        self,
        program: ProgramSaving,
        extra: Mapping[str, Any] | None = None,
        score: float | None = None,
    ) -> Path | None:
        """Save a program after every so many steps; None after the others. Every process must call it."""
        _check_program(program)
        step = program.steps
        due = step > 0 and step % self.every == 0
        return self.save(program, extra, score) if due else None

    def load_newest(
        self, program: ProgramSaving, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Let a program continue from the newest checkpoint that is whole. Every process must call it.

        One that is damaged, or was never whole, is named in a warning, and the one before is taken.

        Returns:
            What `Program.load` returns; None if there is no checkpoint yet.

        Raises:
            UserError: all are damaged; or the newest that is whole is of another model, or lacks an extra.
        """
        _check_program(program)
        errors: list[str] = []
        program.wait_for_saved()
        if program.is_first and not is_of_another_job(self.folder):
            self._put_back()
        names: list[str] = []
        for place in self.all() if program.is_first else ():
            # One that was never there, or is gone, has no file of one.
            if (place / NAME).exists() or any(place.glob(f"*{SUFFIX}")):
                names.append(place.name)
            else:
                text = "%s is not a checkpoint, as it has no %s; trying the checkpoint before"
                _log.warning(text, place, NAME)
        if program.exchange is not None:
            names = json.loads(program.exchange(json.dumps(names))[0])
        for name in reversed(names):
            try:
                return program.load(self.folder / name, extra)
            except DamagedCheckpoint as error:
                errors.append(str(error))
                _log.warning("%s; trying the checkpoint before", error)
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

    def _put_back(self) -> None:
        for each in self.folder.glob(f".{_PREFIX}*{REPLACED}"):
            try:
                put_back(self.folder / each.name.split(".")[1])
            except OSError as error:
                _log.warning("%s was being replaced, and cannot be restored: %s", each, error)

    def _take_away(self, step: int) -> None:
        """Take away old ones, counted back from a step: those of later ones are of a run that continued otherwise."""
        found = [(int(each.name.removeprefix(_PREFIX)), each) for each in self.all()]
        every = [each for number, each in found if number <= step]
        scores: dict[Path, float] = {}
        for _, each in found:
            with suppress(UserError):
                extra = read_manifest(each).about.get(EXTRA, {})
                score = extra.get(SCORE) if isinstance(extra, dict) else None
                if is_number(score):
                    scores[each] = float(score)
        best = min(scores, key=lambda each: (scores[each], each), default=None)
        for each in every[: -self.keep]:
            if each != best and _is_own(each):
                shutil.rmtree(each, ignore_errors=True)
        if len(every) < len(found):
            _log.warning(
                "%s has checkpoints of later steps than %d, up to %s, which load_newest prefers to the newer saves "
                "of this run; remove them if the run continues from here",
                *(self.folder, step, found[-1][1].name),
            )


def _check_program(program: object) -> None:
    if not hasattr(program, "wait_for_saved"):
        raise wrong("weft.Checkpoints: program", "a weft.Program", program)


def check_names(extra: object, taken: Iterable[str], why: str) -> None:
    """Raise UserError, naming the first of the user's extras under a name that weft takes for its own."""
    for name in taken:
        if isinstance(extra, Mapping) and name in extra:
            raise UserError(f"{why} among the extras as {name!r}; give yours another name")


def _is_own(place: Path) -> bool:
    """True for a checkpoint, also one of which a part is gone: nothing of others is there."""
    with suppress(OSError):  # nobody may look there
        names = [] if place.is_symlink() else os.listdir(place)
        return may_go(place) or (bool(names) and all(map(_OWN.fullmatch, names)))
    return False


def _make_room(place: Path) -> None:
    """Take away what is left of a checkpoint where a new one is to be; what is none's is set aside."""
    if not os.path.lexists(place):
        return
    try:
        if _is_own(place):
            if not may_go(place):
                shutil.rmtree(place)
            return
        numbers = (place.with_name(f"{place.name}.aside-{number}") for number in count(1))
        aside = next(each for each in numbers if not os.path.lexists(each))
        place.rename(aside)
        _log.warning(
            "%s is not a checkpoint, but has the name of one: it was renamed to %s", place, aside
        )
    except OSError as error:  # saving tells all processes that it cannot be replaced
        _log.warning("%s is not a checkpoint, and cannot be removed: %s", place, error)
