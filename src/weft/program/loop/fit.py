"""fit: steps over a loader, with checkpoints, evaluation and figures, until something ends them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch.optim.lr_scheduler import ReduceLROnPlateau

from weft.errors import UserError, check, is_whole, wrong
from weft.program.agreement import run_on_all
from weft.program.data.loader import Loader
from weft.program.loop.bar import Bar, Means
from weft.program.loop.logs import Figures, Log, begin_logs, end_log, log_of
from weft.program.loop.stopping import Stopping
from weft.program.parts.stepping import batches_of
from weft.program.program import Program
from weft.program.saving.checkpoints import SCORE, Checkpoints, check_names
from weft.program.saving.claims import claim_for_job
from weft.program.saving.manifest import check_place
from weft.tracebacks import shortened
from weft.units import Seconds

_log = logging.getLogger("weft")
# So many checkpoints without a score, and none with one, are told.
_UNSCORED = 2

LOADER = "loader"
# The number of epochs that were made of a loader that keeps none itself.
EPOCHS = "fit.epochs"
# Batches of a loader with workers that may be loaded before their step.
AHEAD = 2
# After these ends an evaluation is made; not after a signal, which leaves little time.
_AT_THE_END = ("steps", "epochs", "stop")


@final
@dataclass(frozen=True)
class Fitted:
    """The end of a loop.

    Attributes:
        steps: that the program has made, over all its runs.
        why: "steps", "epochs", "stop" where the user's function said so, or the name of a signal.
        figures: the last ones of each name.
    """

    steps: int
    why: str
    figures: Figures = field(default_factory=dict)


@shortened
def fit(
    program: Program,
    loader: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    checkpoint: Checkpoints | None = None,
    extra: Mapping[str, Any] | None = None,
    schedulers: Sequence[Any] = (),
    accumulate: int = 1,
    log: Sequence[Any] = (),
    log_every: int = 10,
    stop: Callable[[int, Figures], bool] | None = None,
    progress: bool = True,
) -> Fitted:
    """Train until so many steps or epochs are made. Every process calls it.

    Where `checkpoint` has a checkpoint and the program has made no step yet, the loop goes on from the newest: program,
    schedulers, the loader's place and `extra`. SIGTERM and Ctrl-C end it after the same step on all processes, with a
    checkpoint. It returns once that is written.

    Args:
        program: that trains.
        loader: gives batches: a `weft.Loader`, whose place checkpoints keep, or anything that can be looped over.
        steps: of the program, with those made before: batches, also where an update takes several; it ends after the
            update that reaches them.
        epochs: of the loader, with those made before. Of one that is no `weft.Loader` whole ones count: a run that goes
            on in the middle of one makes it once more.
        evaluate: gives figures, as of a program that `Program.evaluation` makes.
        evaluate_every: steps between evaluations; by default there is one after each epoch. There is one at the end,
            too, unless a signal ends the loop.
        checkpoint: writes checkpoints when they are due, and at the end.
        extra: more that checkpoints keep, as `Program.save` takes it; what has `load_state_dict` goes on, too.
        schedulers: of learning rates, stepped after each update. One that steps by a figure, as `ReduceLROnPlateau`
            does, is the user's to step, in `evaluate`.
        accumulate: batches whose gradients one update adds up; their mean is the user's to take in the loss.
        log: where the first process writes figures, as `weft.logs.JsonLines(path)` or a function of step and figures.
        log_every: steps between figures: the loss is the mean over the batches since the last ones, and is waited for
            then alone.
        stop: of step and figures, when there are new ones: True ends the loop. The first process asks it.
        progress: False shows no bar; it is shown by the first process, on a terminal.

    Raises:
        UserError: an argument cannot be; or nothing can be written at `checkpoint`, or to a log.
    """
    _check_numbers(steps, epochs, accumulate, log_every, evaluate_every)
    _check_kinds(program, loader, checkpoint, extra, schedulers, log)
    _check_functions(evaluate=evaluate, stop=stop)
    if isinstance(loader, Loader):
        check_names(extra, (LOADER,), "weft.fit: the place of the loader stands")
    if checkpoint is not None:
        check_names(extra, (SCORE,), "weft.fit: the score of a checkpoint stands")
        check_names(extra, (EPOCHS,), "weft.fit: the number of epochs stands")
    check_names(extra, _scheduler_names(schedulers), "weft.fit: a scheduler stands")
    logs = [log_of(each) for each in log]
    if checkpoint is not None:
        place, first = checkpoint.folder, program.is_first
        run_on_all(program.world, "the folder", lambda: check_place(place) if first else None)
        claim_for_job(place, program)
    loop = _Loop(program, loader, schedulers, accumulate, checkpoint, dict(extra or {}))
    loop.resume()
    with ExitStack() as stack:
        for each in logs:
            stack.push(partial(end_log, each))
        step, first = program.steps, program.is_first
        run_on_all(program.world, "the logs", lambda: begin_logs(logs, step) if first else None)
        stopping = Stopping(program.exchange)
        stack.enter_context(stopping.listening())
        bar = stack.enter_context(Bar(progress and program.is_first, steps))
        telling = _Telling(program, logs, stop, bar, evaluate)
        run = _Run(loop, telling, stopping, steps, epochs, evaluate_every, log_every)
        why = run.until_its_end()
        if checkpoint is not None and not checkpoint.wait:
            program.wait_for_saved()
    return Fitted(program.steps, why, telling.last)


@final
@dataclass
class _Run:
    """The loop itself: steps until something ends it."""

    loop: _Loop
    telling: _Telling
    stopping: Stopping
    steps: int | None
    epochs: int | None
    evaluate_every: int | None
    log_every: int
    before: int = 0

    def until_its_end(self) -> str:
        """Make steps; why they ended."""
        loop, telling = self.loop, self.telling
        own = loop.loader if isinstance(loop.loader, Loader) else None
        why = "steps" if self._reached() else ""
        empty, self.before = 0, loop.program.steps
        while not why:
            if self.epochs is not None and loop.epochs >= self.epochs:
                why = "epochs"
                break
            before = loop.program.steps
            why = self._epoch()
            loop.made += own is None and not why
            # A loader may go on behind the last batch of an epoch.
            empty = empty + 1 if loop.program.steps == before else 0
            if empty > 1:
                raise UserError(
                    "weft.fit: the loader gives no batches; give one whose epochs have some"
                )
            if own is None and not why and not empty:
                loop.save(telling.now(), ends=False)  # with the number of epochs
            if not why and not self.evaluate_every and not empty:
                why = telling.of(telling.evaluated())
                loop.save(telling.now(), ends=False)
        if why in _AT_THE_END and telling.evaluation != loop.program.steps:
            telling.of(telling.evaluated())
        loop.save(telling.now(), ends=True)
        return why

    def _epoch(self) -> str:
        """The rest of an epoch; why it ended before its last batch."""
        for samples, waited in self.loop.epoch():
            why = self._after(samples, waited)
            self.loop.save(self.telling.now(), ends=bool(why))
            if why:
                return why
        return ""

    def _after(self, samples: int, waited: Seconds) -> str:
        """Tell of an update; why the loop ends after it."""
        telling, step = self.telling, self.loop.program.steps
        telling.bar.advance(step, samples, waited)
        number = self.stopping.after_step()
        why = signal.Signals(number).name if number else "steps" if self._reached() else ""
        new: dict[str, float] = {}
        if _passed(self.before, step, self.log_every) or why:
            new |= self.loop.means.taken() | telling.bar.figures()
        if self.evaluate_every and _passed(self.before, step, self.evaluate_every):
            new |= telling.evaluated()
        self.before = step
        return telling.of(new) or why

    def _reached(self) -> bool:
        return self.steps is not None and self.loop.program.steps >= self.steps


@final
@dataclass
class _Telling:
    """Figures on their way to bar, logs, and the user's function that may end the loop."""

    program: Program
    logs: Sequence[Log]
    stop: Callable[[int, Figures], bool] | None
    bar: Bar
    evaluate: Callable[[], Mapping[str, float]] | None
    last: dict[str, float] = field(default_factory=dict)
    evaluation: int = -1
    # A step, and the figures that were told of it.
    told: tuple[int, dict[str, float]] = (-1, {})

    def evaluated(self) -> Mapping[str, float]:
        """The figures of an evaluation now; none where there is none."""
        self.evaluation = self.program.steps
        found = self.evaluate() if self.evaluate is not None else {}
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"weft.fit: evaluate gave {found!r}, and takes a dict of numbers by name: {error}"
            ) from None

    def now(self) -> Figures:
        """The figures of the step that was made last."""
        step, figures = self.told
        return figures if step == self.program.steps else {}

    def of(self, new: Mapping[str, float]) -> str:
        """Tell new figures; "stop" where the user says so, on all processes."""
        if not new:
            return ""
        self.last |= new
        self.told = (self.program.steps, {**self.now(), **new})
        self.bar.show(self.last)
        first, step = self.program.is_first, self.program.steps
        for each in self.logs if first else ():
            each.write(step, new)
        if self.stop is None:
            return ""
        said = "stop" if first and self.stop(step, new) else ""
        exchange = self.program.exchange
        return said if exchange is None else exchange(said)[0]


@final
@dataclass
class _Loop:
    """The steps of a loop and its checkpoints."""

    program: Program
    loader: Iterable[Any]
    schedulers: Sequence[Any]
    accumulate: int
    checkpoint: Checkpoints | None
    extra: dict[str, Any]
    saved: int = 0
    scored: int = -1
    # Epochs of a loader that does not count them itself: made, and in the last checkpoint.
    made: int = 0
    counted: int = 0
    means: Means = field(default_factory=Means)
    # Names of all figures so far, and how many checkpoints have none that is the score.
    seen: set[str] = field(default_factory=set)
    unscored: int = 0

    @property
    def epochs(self) -> int:
        """Of the loader, those of earlier runs included."""
        return self.loader.epoch if isinstance(self.loader, Loader) else self.made

    def epoch(self) -> Iterator[tuple[int, Seconds]]:
        """Train by what the loader still has; the samples of each update, and waits for its batches."""
        samples, waited = 0, 0.0
        ahead = AHEAD if isinstance(self.loader, Loader) else 0
        core = self.program._core
        for number, batch in enumerate(batches_of(core, self.loader, ahead), 1):
            wait = core.waits[core.steps]
            waited += (wait.end - wait.begin) / 1e9
            updates = number % self.accumulate == 0
            self.means.add(self.program.step(batch, update=updates))
            samples += core.samples
            if updates:
                for each in self.schedulers:
                    each.step()
                yield samples, Seconds(waited)
                samples, waited = 0, 0.0
        if samples:
            # Fewer batches than an update takes were left.
            self.program.update()
            for each in self.schedulers:
                each.step()
            yield samples, Seconds(waited)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        if self.checkpoint is not None and self.program.steps == 0:
            # An extra without load_state_dict is saved alone.
            kept = {n: x for n, x in self._kept().items() if hasattr(x, "load_state_dict")}
            found = self.checkpoint.load_newest(self.program, kept) or {}
            self.made = self.counted = int(found.get(EPOCHS, 0))
        self.saved = self.program.steps

    def save(self, figures: Figures, ends: bool) -> None:
        """Write a checkpoint where it is due, or the loop ends."""
        kept, step = self.checkpoint, self.program.steps
        if kept is None or not step:
            return
        self.seen |= figures.keys()
        score = figures.get(kept.score or "")
        # What was saved before it was evaluated is saved with its figure; before its epoch was over, with that.
        new = (score is not None and self.scored != step) or self.counted != self.made
        again = new and step == self.saved
        due = step != self.saved and (ends or _passed(self.saved, step, kept.every))
        if due or again:
            kept.save(self.program, self._kept(), score)
            self.saved, self.counted = step, self.made
            self.scored = self.scored if score is None else step
            self.unscored += score is None
            if kept.score and self.scored < 0 and self.unscored == _UNSCORED:
                self._tell_of_no_score(kept.score)

    def _tell_of_no_score(self, name: str) -> None:
        """Warn that no checkpoint so far can be the best."""
        if self.program.is_first:
            _log.warning(
                "weft.fit: no checkpoint of this run has a score so far, as there was no figure %r at their steps; "
                "found %s: name one of these, and let evaluate_every, or log_every, divide `every`",
                name,
                ", ".join(sorted(self.seen)) or "none",
            )

    def _kept(self) -> dict[str, Any]:
        names = _scheduler_names(self.schedulers)
        own: dict[str, Any] = dict(zip(names, self.schedulers, strict=True))
        if isinstance(self.loader, Loader):
            own[LOADER] = self.loader
        else:
            own[EPOCHS] = self.made
        return {**self.extra, **own}


def _scheduler_names(schedulers: Sequence[Any]) -> list[str]:
    return [f"scheduler.{number}" for number in range(len(schedulers))]


def _passed(before: int, now: int, every: int) -> bool:
    """True where a multiple lies behind one number of steps, up to another."""
    return now // every > before // every


def _check_numbers(
    steps: int | None, epochs: int | None, accumulate: int, log_every: int, every: int | None
) -> None:
    """See that counts are counts, and that something ends the loop.

    Raises:
        UserError: one is none, or nothing ends it.
    """
    if steps is None and epochs is None:
        raise UserError("weft.fit: give steps or epochs, so that it ends")
    named = {"steps": steps, "epochs": epochs, "evaluate_every": every}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in {**given, "accumulate": accumulate, "log_every": log_every}.items():
        if not is_whole(value, 1):
            raise wrong(f"weft.fit: {name}", "a number from 1", value)


def _check_kinds(
    program: object,
    loader: object,
    checkpoint: object,
    extra: object,
    schedulers: object,
    log: object,
) -> None:
    """See that each is of its kind; logs themselves are checked where they are made.

    Raises:
        UserError: one is not.
    """
    batches = "batches that can be looped over, such as a weft.Loader"
    saves, keeps = isinstance(checkpoint, Checkpoints | None), isinstance(extra, Mapping | None)
    lists = [isinstance(x, Sequence) and not isinstance(x, str) for x in (schedulers, log)]
    check(
        "weft.fit",
        (isinstance(program, Program), "program", "the program that weft.compile gives", program),
        (isinstance(loader, Iterable), "loader", batches, loader),
        (saves, "checkpoint", "a weft.Checkpoints(folder)", checkpoint),
        (keeps, "extra", "a dict of what is to be saved by name", extra),
        (lists[0], "schedulers", "a list, also of a single one", schedulers),
        (lists[1], "log", "a list, also of a single one", log),
    )
    for each in schedulers if isinstance(schedulers, Sequence) else ():
        if isinstance(each, ReduceLROnPlateau) or not hasattr(each, "step"):
            expected = "what steps after an update"
            remedy = "step one that follows a figure in evaluate, and give it as extra, so that checkpoints keep it"
            raise wrong("weft.fit: schedulers", expected, each, remedy=remedy)


def _check_functions(**given: object) -> None:
    """See that what is given by these names can be called.

    Raises:
        UserError: one cannot.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            raise wrong(f"weft.fit: {name}", "a function", value)
