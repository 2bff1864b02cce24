"""The record of a search: its result and measures, for the next one (`start=`, `weft search --resume`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, final

from weft.atomic_files import write_atomically
from weft.errors import UNREADABLE, UserError
from weft.planning.machine import Machine
from weft.planning.stored_step import StoredStep
from weft.search.candidate import COLUMNS, WIDTH, Candidate, may_be
from weft.search.measures import Answer, Measures, TooSlow, Unplannable
from weft.strategy.parts import zero_axis, zero_rules
from weft.strategy.strategy import Strategy
from weft.strategy.text import LAYOUTS
from weft.units import Bytes, Seconds
from weft.version import __version__

FORMAT = 2
# For a file; ten thousand strategies take a megabyte or two.
MAX_BYTES = 1 << 28
# Entries that change what every strategy takes.
_OF_ALL = ("precision", "clip_norm", "recompute", "offload", "expert_capacity", "in_flight")


@final
@dataclass(frozen=True)
class SearchRecord:
    """The result of a search, for the next one.

    Attributes:
        best: the strategy that it found.
        fixed: the entries that it kept.
        step: the fingerprint of the captured step.
        machine: the fingerprint of the machine.
        learned: measures of strategies and candidates.
    """

    best: Strategy
    fixed: Strategy
    step: str
    machine: str
    learned: Learned = field(repr=False)

    def is_of(self, step: StoredStep, machine: Machine) -> bool:
        """True if it was made of this step on this machine."""
        return (self.step, self.machine) == (step.fingerprint, machine.fingerprint)

    def learned_of(self, step: StoredStep, machine: Machine, fixed: Strategy) -> Learned:
        """The part that is valid for a search of that step, on that machine, with those fixed entries.

        Strategies take what they took. Candidates take about that, where nothing is fixed otherwise that changes all,
        and
        no layout was fixed that is free now: candidates may be far faster without it.
        """
        if not self.is_of(step, machine):
            return Learned()
        same = all(
            getattr(fixed, entry).get(pattern) == said
            for entry in (*LAYOUTS, "signatures")
            for pattern, said in getattr(self.fixed, entry).items()
        )
        if _of_all(self.fixed) != _of_all(fixed) or not same:
            return Learned(self.learned.answers, self.learned.longer)
        return self.learned

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            UserError: it cannot be written.
        """
        content = {
            "weft search": FORMAT,
            "weft": __version__,
            "step": self.step,
            "machine": self.machine,
            "best": self.best.to_text(),
            "fixed": self.fixed.to_text(),
            **to_json(self.learned),
        }
        write_atomically(path, json.dumps(content), "the record of the search")

    @staticmethod
    def load(path: str | Path) -> SearchRecord:
        """Read a file that `save` wrote.

        Raises:
            UserError: the file cannot be read, is invalid, or of another version of weft.
        """
        where = f"the record of a search {path}"
        try:
            with Path(path).open("rb") as file:
                text = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            why = getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot read {where}: {why}; give a file that weft search wrote beside its strategy"
            ) from None
        try:
            if len(text) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            content = json.loads(text)
            if (content["weft search"], content["weft"]) != (FORMAT, __version__):
                raise UserError(
                    f"{where} was written by weft {content['weft']!r}, this is weft {__version__}; search again, with "
                    "its strategy as the start"
                )
            return SearchRecord(
                Strategy.from_text(_text(content["best"]), path),
                Strategy.from_text(_text(content["fixed"]), path),
                _text(content["step"]),
                _text(content["machine"]),
                from_json(content),
            )
        except UNREADABLE as error:
            raise UserError(
                f"{where} cannot be read ({type(error).__name__}: {error}); search again, with its strategy as the "
                "start"
            ) from None


def _of_all(fixed: Strategy) -> tuple[object, ...]:
    """The fixed entries that change what candidates take; a level of ZeRO for all, along the data axis, is of
    theirs.
    """
    by_patterns = isinstance(fixed.zero, Mapping) or zero_axis(fixed.zero)
    zero = zero_rules(fixed.zero) if by_patterns else None
    return *(getattr(fixed, name) for name in _OF_ALL), zero


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise ValueError(f"expected a text, got {found!r}")
    return found


def to_json(learned: Learned) -> dict[str, Any]:
    """The measurements as dicts, lists, numbers and strings."""
    return {
        "answers": {key: _answer_json(each) for key, each in learned.answers.items()},
        "longer": {key: each.seconds for key, each in learned.longer.items()},
        "points": [[*astuple(key), _answer_json(each)] for key, each in learned.candidates.items()],
        "looks": [
            [*astuple(candidate), _answer_json(look.answer), look.seconds]
            for candidate, look in learned.looks.items()
        ],
    }


def _answer_json(answer: Answer | None) -> list[float] | str | None:
    if isinstance(answer, Unplannable):
        return answer.why
    if answer is None:
        return None
    return [answer.seconds, answer.memory, answer.exposed, answer.idle]


def from_json(content: Mapping[str, Any]) -> Learned:
    """The measures from the result of `to_json`.

    Raises:
        ValueError, TypeError, KeyError: it is not a result of `to_json`.
    """
    return Learned(
        {str(key): _answer(each) for key, each in content["answers"].items()},
        {str(key): TooSlow(Seconds(_number(each))) for key, each in content["longer"].items()},
        {_point(row): _answer(answer) for *row, answer in content["points"]},
        {
            _point(row): Probe(None if answer is None else _answer(answer), _number(seconds))
            for *row, answer, seconds in content["looks"]
        },
    )


def _answer(found: Any) -> Answer:
    if isinstance(found, str):
        return Unplannable(found)
    seconds, memory, exposed, idle = map(_number, found)
    return Measures(Seconds(seconds), Bytes(int(memory)), Seconds(exposed), Seconds(idle))


def _number(found: Any) -> float:
    """A finite number, not below 0; whole ones stay whole."""
    wrong = isinstance(found, bool) or not isinstance(found, int | float)
    if wrong or not isfinite(found) or found < 0:
        raise ValueError(f"expected a number that is not below 0, got {found!r}")
    return found  # type: ignore[no-any-return]


def _point(row: list[Any]) -> Candidate:
    if len(row) != WIDTH:
        raise ValueError(f"expected the {WIDTH} coordinates of a candidate, got {row!r}")
    for name, found in zip(COLUMNS, row, strict=True):
        if not may_be(name, found):
            raise ValueError(f"expected a candidate's {name}, got {found!r}")
    return Candidate(*row)


@final
class Probe(NamedTuple):
    """A probe of a candidate by plans of few blocks.

    Attributes:
        answer: estimated measures of the whole, or why it cannot be planned; None if the step is too small to probe.
        seconds: in which the whole would be planned, about.
    """

    answer: Answer | None
    seconds: float


@final
@dataclass(frozen=True)
class Learned:
    """The measures of strategies and candidates.

    Attributes:
        answers: of strategies that were planned, by `key_of`.
        longer: other strategies, slower than the limit asked for, by the same key.
        candidates: of the space, as they were planned with what was fixed then.
        looks: at candidates without stages.
    """

    answers: Mapping[str, Answer] = field(default_factory=dict)
    longer: Mapping[str, TooSlow] = field(default_factory=dict)
    candidates: Mapping[Candidate, Answer] = field(default_factory=dict)
    looks: Mapping[Candidate, Probe] = field(default_factory=dict)

    def was_slower(self, candidate: Candidate, seconds: float) -> bool:
        """True if a candidate took longer than that."""
        found = self.candidates.get(candidate)
        return isinstance(found, Measures) and found.seconds > seconds
