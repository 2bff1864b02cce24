"""fit: steps over a loader, with checkpoints, evaluation and figures, until something ends them."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, final

from torch.optim.lr_scheduler import ReduceLROnPlateau

from weft.errors import UserError, check, is_whole, wrong
from weft.program.agreement import run_on_all
from weft.program.checkpoint.checkpoints import SCORE, Checkpoints, check_names, claim_for_job
from weft.program.checkpoint.manifest import check_place
from weft.program.data.loader import Loader
from weft.program.loop.bar import ProgressBar, RunningMeans
from weft.program.loop.logs import Figures, Log, begin_logs, end_log, log_of
from weft.program.program import Program
from weft.program.stepping import batches_of
from weft.runtime.world.launch import ending_signals
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
        why: "steps", "epochs", "stop" if the user's function said so, or the name of a signal.
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

    Where `checkpoint` has a checkpoint and the program has made no step yet, the loop continues from the newest:
    program, schedulers, the loader's place and `extra`. SIGTERM and Ctrl-C end it after the same step on all
    processes, with a checkpoint. It returns once that is written.

    Args:
        program: that trains.
        loader: gives batches: a `weft.Loader`, whose place checkpoints keep, or anything that can be looped over.
        steps: of the program, with those made before: batches, also where an update takes several; it ends after the
            update that reaches them.
        epochs: of the loader, with those made before. With a loader other than `weft.Loader`, a run that resumes
            inside an epoch repeats that epoch from its start.
        evaluate: gives figures, as of a program that `Program.evaluation` makes.
        evaluate_every: steps between evaluations; by default there is one after each epoch. There is one at the end,
            too, unless a signal ends the loop.
        checkpoint: writes checkpoints when they are due, and at the end.
        extra: more that checkpoints keep, as `Program.save` takes it; what has `load_state_dict` continues, too.
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
    if steps is None and epochs is None:
        raise UserError("weft.fit: give steps or epochs, so that it ends")
    counts = {"steps": steps, "epochs": epochs, "evaluate_every": evaluate_every}
    given = {name: value for name, value in counts.items() if value is not None}
    for name, value in {**given, "accumulate": accumulate, "log_every": log_every}.items():
        if not is_whole(value, 1):
            raise wrong(f"weft.fit: {name}", "a number from 1", value)
    _check_kinds(program, loader, checkpoint, extra, schedulers, log, evaluate, stop)
    if isinstance(loader, Loader):
        check_names(extra, (LOADER,), "weft.fit: the place of the loader stands")
    if checkpoint is not None:
        check_names(extra, (SCORE,), "weft.fit: the score of a checkpoint stands")
        check_names(extra, (EPOCHS,), "weft.fit: the number of epochs stands")
    check_names(extra, _scheduler_names(schedulers), "weft.fit: a scheduler stands")
    logs = [log_of(each) for each in log]
    first = program.is_first
    if checkpoint is not None:
        place = checkpoint.folder
        run_on_all(program.world, "the folder", lambda: check_place(place) if first else None)
        claim_for_job(place, program)
    loop = _Loop(
        *(program, loader, schedulers, accumulate, checkpoint, dict(extra or {}), logs),
        steps=steps,
        epochs=epochs,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        log_every=log_every,
        stop=stop,
    )
    loop.resume()
    with ExitStack() as stack:
        for each in logs:
            stack.push(partial(end_log, each))
        step = program.steps
        run_on_all(program.world, "the logs", lambda: begin_logs(logs, step) if first else None)
        loop.stopping = StopSignals(program.exchange)
        stack.enter_context(loop.stopping.listening())
        loop.bar = stack.enter_context(ProgressBar(progress and first, steps))
        why = loop.until_its_end()
        if checkpoint is not None and not checkpoint.wait:
            program.wait_for_saved()
    return Fitted(program.steps, why, loop.last)


@final
@dataclass(slots=True)
class _Loop:
    """The loop: steps until something ends it, checkpoints, and figures on their way to bar, logs and `stop`.

    Attributes:
        saved, scored: steps of the last checkpoint, and of the last one that has a score.
        made, counted: epochs of a loader that does not count them itself: made, and in the last checkpoint.
        told: a step, and the figures that were told of it.
        before: the step of the last figures.
    """

    program: Program
    loader: Iterable[Any]
    schedulers: Sequence[Any]
    accumulate: int
    checkpoint: Checkpoints | None
    extra: dict[str, Any]
    logs: Sequence[Log]
    steps: int | None
    epochs: int | None
    evaluate: Callable[[], Mapping[str, float]] | None
    evaluate_every: int | None
    log_every: int
    stop: Callable[[int, Figures], bool] | None
    bar: ProgressBar = field(init=False)
    stopping: StopSignals = field(init=False)
    saved: int = 0
    scored: int = -1
    made: int = 0
    counted: int = 0
    unscored: int = 0
    means: RunningMeans = field(default_factory=RunningMeans)
    seen: set[str] = field(default_factory=set)
    last: dict[str, float] = field(default_factory=dict)
    told: tuple[int, dict[str, float]] = (-1, {})
    evaluated_at: int = -1
    before: int = 0

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        if self.checkpoint is not None and self.program.steps == 0:
            # An extra without load_state_dict is saved alone.
            kept = {n: x for n, x in self._kept().items() if hasattr(x, "load_state_dict")}
            found = self.checkpoint.load_newest(self.program, kept) or {}
            self.made = self.counted = int(found.get(EPOCHS, 0))
        self.saved = self.before = self.program.steps

    def until_its_end(self) -> str:
        """Make steps; why they ended."""
        counts_epochs = not isinstance(self.loader, Loader)
        why, empty = "steps" if self._reached() else "", 0
        while not why:
            epoch = self.made if counts_epochs else self.loader.epoch  # type: ignore[attr-defined]
            if self.epochs is not None and epoch >= self.epochs:
                why = "epochs"
                break
            before = self.program.steps
            why = next(filter(None, self._epoch()), "")
            self.made += counts_epochs and not why
            # A loader may continue after the last batch of an epoch.
            empty = empty + 1 if self.program.steps == before else 0
            if empty > 1:
                raise UserError(
                    "weft.fit: the loader gives no batches; give one whose epochs have some"
                )
            if counts_epochs and not why and not empty:
                self.save()  # with the number of epochs
            if not why and not self.evaluate_every and not empty:
                why = self._tell(self._evaluated())
                self.save()
        if why in _AT_THE_END and self.evaluated_at != self.program.steps:
            self._tell(self._evaluated())
        self.save(ends=True)
        return why

    def _epoch(self) -> Iterator[str]:
        """Train by what the loader still has; after each update why the loop ends then, or nothing."""
        samples, waited, core = 0, 0.0, self.program._core
        ahead = AHEAD if isinstance(self.loader, Loader) else 0
        for number, batch in enumerate(batches_of(core, self.loader, ahead), 1):
            wait = core.waits[core.steps]
            waited += (wait.end - wait.begin) / 1e9
            updates = number % self.accumulate == 0
            self.means.add(self.program.step(batch, update=updates))
            samples += core.samples
            if updates:
                yield self._updated(samples, Seconds(waited))
                samples, waited = 0, 0.0
        if samples:
            # Fewer batches than an update takes were left.
            self.program.update()
            yield self._updated(samples, Seconds(waited))

    def _updated(self, samples: int, waited: Seconds) -> str:
        """Step schedulers after an update, tell of it, save where that is due; why the loop ends after it."""
        for each in self.schedulers:
            each.step()
        step = self.program.steps
        self.bar.advance(step, samples, waited)
        number = self.stopping.after_step()
        why = signal.Signals(number).name if number else "steps" if self._reached() else ""
        new: dict[str, float] = {}
        if _passed(self.before, step, self.log_every) or why:
            new |= self.means.taken() | self.bar.figures()
        if self.evaluate_every and _passed(self.before, step, self.evaluate_every):
            new |= self._evaluated()
        self.before = step
        why = self._tell(new) or why
        self.save(ends=bool(why))
        return why

    def _reached(self) -> bool:
        return self.steps is not None and self.program.steps >= self.steps

    def _evaluated(self) -> Mapping[str, float]:
        """The figures of an evaluation now; none where there is none."""
        self.evaluated_at = self.program.steps
        found = self.evaluate() if self.evaluate is not None else {}
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"weft.fit: evaluate must return a dict of name to number, got {found!r}: {error}"
            ) from None

    def _now(self) -> dict[str, float]:
        step, figures = self.told
        return figures if step == self.program.steps else {}

    def _tell(self, new: Mapping[str, float]) -> str:
        """Tell new figures; "stop" if the user says so, on all processes."""
        if not new:
            return ""
        first, step = self.program.is_first, self.program.steps
        self.last |= new
        self.told = (step, {**self._now(), **new})
        self.bar.show(self.last)
        for each in self.logs if first else ():
            each.write(step, new)
        if self.stop is None:
            return ""
        said = "stop" if first and self.stop(step, new) else ""
        exchange = self.program.exchange
        return said if exchange is None else exchange(said)[0]

    def save(self, ends: bool = False) -> None:
        """Write a checkpoint where it is due, or the loop ends."""
        kept, step, figures = self.checkpoint, self.program.steps, self._now()
        if kept is None or not step:
            return
        self.seen |= figures.keys()
        score = figures.get(kept.score or "")
        # A checkpoint saved before its evaluation is saved again with the score; before its epoch was over, with
        # that.
        new = (score is not None and self.scored != step) or self.counted != self.made
        due = step != self.saved and (ends or _passed(self.saved, step, kept.every))
        if not due and not (new and step == self.saved):
            return
        kept.save(self.program, self._kept(), score)
        self.saved, self.counted = step, self.made
        self.scored = self.scored if score is None else step
        self.unscored += score is None
        silent = not kept.score or self.scored >= 0 or self.unscored != _UNSCORED
        if not silent and self.program.is_first:
            _log.warning(
                "weft.fit: no checkpoint of this run has a score so far, because there was no metric %r at their "
                "steps; found %s: name one of these, and let evaluate_every, or log_every, divide `every`",
                kept.score,
                ", ".join(sorted(self.seen)) or "none",
            )

    def _kept(self) -> dict[str, Any]:
        names = _scheduler_names(self.schedulers)
        own: dict[str, Any] = dict(zip(names, self.schedulers, strict=True))
        loads = isinstance(self.loader, Loader)
        return {**self.extra, **own, **({LOADER: self.loader} if loads else {EPOCHS: self.made})}


def _scheduler_names(schedulers: Sequence[Any]) -> list[str]:
    return [f"scheduler.{number}" for number in range(len(schedulers))]


def _passed(before: int, now: int, every: int) -> bool:
    """True if a multiple lies behind one number of steps, up to another."""
    return now // every > before // every


def _check_kinds(
    program: object,
    loader: object,
    checkpoint: object,
    extra: object,
    schedulers: object,
    log: object,
    evaluate: object,
    stop: object,
) -> None:
    """Refuse what is of another kind; logs themselves are checked where they are made."""
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
        (evaluate is None or callable(evaluate), "evaluate", "a function", evaluate),
        (stop is None or callable(stop), "stop", "a function", stop),
    )
    for each in schedulers if isinstance(schedulers, Sequence) else ():
        if isinstance(each, ReduceLROnPlateau) or not hasattr(each, "step"):
            expected = "what steps after an update"
            remedy = "step one that follows a figure in evaluate, and give it as extra, so that checkpoints keep it"
            raise wrong("weft.fit: schedulers", expected, each, remedy=remedy)


# Processes compare notes about so often.
_EVERY = Seconds(0.5)
# Steps between two comparisons at most: steps may become slower.
_MOST = 1000


@final
class StopSignals:
    """The decision that a loop is to end, the same on all processes.

    Args:
        tell: gives the texts of all processes, given this one's; None if this is the only one.
    """

    def __init__(self, tell: Callable[[str], list[str]] | None) -> None:
        self._tell = tell
        self._signal = 0
        self._left = 0
        self._since = time.monotonic()
        self._steps = 0

    def after_step(self) -> int:
        """The number of the signal that ends the loop now; 0 to continue. All processes call it after each step."""
        if self._tell is None:
            return self._signal
        self._steps += 1
        if self._left > 0:
            self._left -= 1
            return 0
        now = time.monotonic()
        took = max((now - self._since) / self._steps, 1e-6)
        own = [self._signal, max(0, min(int(_EVERY / took), _MOST) - 1)]
        every = [json.loads(text) for text in self._tell(json.dumps(own))]
        self._left = every[0][1]
        self._since, self._steps = time.monotonic(), 0
        return int(max(number for number, _ in every))

    def note(self, number: int, _: FrameType | None = None) -> None:
        """A signal has come; Ctrl-C after another one ends the process as usual.

        SIGTERM may come twice, as where a scheduler sends it to ranks and launcher, and this one to its ranks.
        """
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = self._signal or number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The signals that tell a job to end are noted meanwhile, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {each: signal.signal(each, self.note) for each in ending_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
