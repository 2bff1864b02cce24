"""Strategies to what they take: each is planned and simulated, once; passes keep what they made for the next."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing.connection import Connection
from time import monotonic
from typing import final

from weft.compiler.pass_cache import KEPT, PassCache
from weft.compiler.pipeline import Compiled
from weft.compiler.stages.lay_out import Deduced
from weft.errors import InternalError, UserError
from weft.layout import Placement
from weft.planning.machine import Machine, placement_on
from weft.planning.plans import PricedStep, plan_stored, planned_step, priced_step
from weft.planning.progress import uncollected
from weft.planning.stored_step import StoredStep, declare
from weft.search.measures import (
    Answer,
    Measures,
    TooSlow,
    Unplannable,
    along,
    key_of,
    measures_of,
)
from weft.search.planners import PlannedAhead, Planners, Setup, StepName
from weft.search.steps.facts import MORE, StepFacts
from weft.simulator.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

UNBOUNDED = Seconds(inf)


@final
@dataclass(frozen=True)
class PlannedWhole:
    """Everything that planning a strategy found out."""

    simulation: Simulation
    deduced: tuple[Deduced, ...]


@final
@dataclass(eq=False)
class Evaluator:
    """Plans and simulates strategies for a step on a machine.

    Attributes:
        step: as it was captured.
        machine: with at least as many devices as a strategy has ranks.
        ranks: all of the machine's that may be used, in order; rank r runs on device r.
        most_classes: the most classes of ranks in a plan; None for no limit.
        name: of the step, for planners.
        planners: processes that plan ahead.
    """

    step: StoredStep
    machine: Machine
    ranks: tuple[int, ...]
    most_classes: int | None = None
    name: StepName = "whole"
    planners: Planners = field(default_factory=Planners, repr=False)
    _known: dict[str, Answer] = field(default_factory=dict, repr=False)
    _longer: dict[str, TooSlow] = field(default_factory=dict, repr=False)
    _took: dict[str, float] = field(default_factory=dict, repr=False)
    _last: dict[str, PlannedWhole] = field(default_factory=dict, repr=False)
    _cache: PassCache = field(default_factory=lambda: PassCache(KEPT), repr=False)

    def learn(self, answers: Mapping[str, Answer], longer: Mapping[str, TooSlow]) -> None:
        """Take what another search knew of the same step on the same machine, by `key_of`."""
        self._known.update(answers)
        self._longer.update(longer)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """All answers so far, by `key_of`."""
        return self._known

    @property
    def longer(self) -> Mapping[str, TooSlow]:
        """Strategies of which no more is known, by `key_of`."""
        return {key: each for key, each in self._longer.items() if key not in self._known}

    def knows(self, strategy: Strategy, most: Seconds = UNBOUNDED) -> bool:
        """True if nothing has to be planned to say what a strategy takes, up to so many seconds."""
        key = key_of(strategy)
        return key in self._known or (key in self._longer and self._longer[key].seconds > most)

    def took(self, strategy: Strategy) -> float:
        """Seconds in which a strategy was planned last; 0 for one that was not."""
        return self._took.get(key_of(strategy), 0.0)

    def ahead(self, strategy: Strategy, most: Seconds = UNBOUNDED) -> bool:
        """Let a free process plan a strategy that will be needed.

        Returns:
            False if none has.
        """
        if not self.planners.has_time():
            return False
        if not self.knows(strategy, most):

            def setup() -> Setup:
                return Setup(self.name, self.step, self.machine, self.ranks, self.most_classes)

            self.planners.ask(self.name, key_of(strategy), strategy, most, setup)
        return True

    def placement(self, strategy: Strategy) -> Placement:
        """The ranks of a strategy, as its grid says.

        Raises:
            UserError: when there are fewer devices.
        """
        machine = self.machine
        found = placement_on(machine.device_type, len(self.ranks), strategy)
        if isinstance(strategy.stages, tuple) and strategy.stages:
            return found
        return Placement(found.device_type, found.shape, self.ranks[: len(found.ranks)])

    def compiled(self, strategy: Strategy) -> Compiled:
        """The plans of a strategy, of one rank of each class.

        Raises:
            UserError: the step cannot be planned so.
        """
        placement, machine = self.placement(strategy), self.machine
        with uncollected():
            return plan_stored(
                self.step,
                strategy,
                placement,
                kinds=machine.kinds(placement.ranks),
                costs=machine.planned,
                cache=self._cache,
                most_classes=self.most_classes,
            )

    def compiled_or_none(self, strategy: Strategy) -> Compiled | None:
        """The plans of a strategy; None for one without, such as `of` refuses: it has no moves that need them."""
        try:
            return self.compiled(strategy)
        except (UserError, InternalError):  # as in `_anew`
            return None

    def whole(self, strategy: Strategy) -> PlannedWhole:
        """The full plan of a strategy.

        Raises:
            UserError: the step cannot be planned so.
        """
        known = self.last(strategy)
        if known is not None:
            return known
        with uncollected():
            compiled, priced = self._priced(strategy)
            made = PlannedWhole(priced.simulation, compiled.deduced)
        self._last.clear()
        self._last[key_of(strategy)] = made
        return made

    def _priced(self, strategy: Strategy) -> tuple[Compiled, PricedStep]:
        compiled = self.compiled(strategy)
        with uncollected():
            planned = planned_step(self.step.graph, compiled, self._cache)
            return compiled, priced_step(planned, self.machine.costs)

    def last(self, strategy: Strategy) -> PlannedWhole | None:
        """The plan of a strategy, if this process planned it last."""
        return self._last.get(key_of(strategy))

    def of(self, strategy: Strategy) -> Answer:
        """The measures of a strategy, or why it cannot be planned."""
        found = self.within(strategy, UNBOUNDED)
        assert not isinstance(found, TooSlow)
        return found

    def within(self, strategy: Strategy, most: Seconds) -> Answer | TooSlow:
        """The measures of a strategy up to a limit of seconds; for slower strategies only that they are slower.

        The busiest queue of the plans is a bound: where that takes longer, nothing is simulated; where the step takes
        longer, what ranks hold is ignored.
        """
        key = key_of(strategy)
        longer = self._longer.get(key)
        if longer is not None and longer.seconds > most:
            return longer
        if key not in self._known:
            found = self._made(key, strategy, most)
            if isinstance(found, TooSlow):
                self._longer[key] = found
                return found
            self._known[key] = found
        return self._known[key]

    def _made(self, key: str, strategy: Strategy, most: Seconds) -> Answer | TooSlow:
        """The answer of a process that has planned ahead, else of a plan of this one."""
        ahead = self.planners.taken(self.name, key)
        if ahead is not None and not (
            isinstance(ahead.answer, TooSlow) and ahead.answer.seconds <= most
        ):
            self._took[key] = ahead.took
            return ahead.answer
        begin = monotonic()
        found = self._anew(key, strategy, most)
        self._took[key] = monotonic() - begin
        self.planners.worked(self._took[key])
        return found

    def _anew(self, key: str, strategy: Strategy, most: Seconds) -> Answer | TooSlow:
        try:
            compiled, priced = self._priced(strategy)
            with uncollected():
                if most != UNBOUNDED:
                    for least in (priced.bound, lambda: priced.ran.step_seconds):
                        if least() > most:
                            return TooSlow(least())
                self._last.clear()
                self._last[key] = PlannedWhole(priced.simulation, compiled.deduced)
                return measures_of(priced.simulation, priced.moments, self.machine)
        except UserError as error:
            return Unplannable(str(error))
        except InternalError as error:
            # A plan that gets stuck, or a pass that does not know the combination: one strategy fewer, no wrong one. It
            # says so among what was tried, or is counted. Any other error is one of the search, and ends it.
            return Unplannable(f"weft cannot plan it: {error}")


# Ranks that are not alike in a step without stages: of more, a plan takes long, and most exchange what others do not.
_MOST_CLASSES = 24


@final
@dataclass(slots=True)
class Probes:
    """Plans strategies of the small steps of a step, where it has some."""

    facts: StepFacts
    whole: Evaluator
    _small: tuple[Evaluator, ...] = field(default=(), repr=False)

    def of(self, strategy: Strategy) -> Answer | None:
        """The measures of a strategy without stages, about, or why it cannot be planned; None for a small step."""
        small = self.facts.small
        if small is None:
            return None
        found = []
        self.ahead(strategy)
        for evaluator in self._evaluators(small):
            answer = evaluator.of(strategy)
            if not isinstance(answer, Measures):
                return answer
            found.append(answer)
        one, two = found
        times = self.facts.along
        line = along(one, two, times)
        # For a step with more of all neither seconds nor bytes are below those of the first. The peak while several
        # micro-batches run grows differently from the memory before and after (of few blocks an update of the embedding
        # may take more than their activations): each on its own line.
        pairs = zip(one.parts, two.parts, strict=True)
        parts = (first + times * (second - first) for first, second in pairs)
        seconds, memory = max(line.seconds, one.seconds), max(line.memory, one.memory, *parts)
        return replace(line, seconds=Seconds(seconds), memory=Bytes(int(memory)))

    def seconds_of_plan(self, strategy: Strategy) -> float:
        """Seconds in which the whole step would be planned and simulated, by those of the small one; 0 if not known."""
        count = self.facts.blocks.count if self.facts.blocks is not None else 1
        return self._small[-1].took(strategy) * count / MORE if self._small else 0.0

    def ahead(self, strategy: Strategy) -> bool:
        """Have its small steps planned by other processes that have time; false where none has."""
        small = self.facts.small
        # The last first: this process begins with the first.
        return small is not None and all(
            each.ahead(strategy) for each in reversed(self._evaluators(small))
        )

    def _evaluators(self, small: tuple[StoredStep, StoredStep]) -> tuple[Evaluator, ...]:
        if not self._small:
            where = self.whole.machine, self.whole.ranks, _MOST_CLASSES
            one, two = small
            self._small = (
                Evaluator(one, *where, "few", self.whole.planners),
                Evaluator(two, *where, "more", self.whole.planners),
            )
        return self._small


def serve(connection: Connection) -> None:
    """Answer the questions of a search until it closes its end, or ends, in the middle of one perhaps."""
    evaluators = dict[StepName, Evaluator]()
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, Setup):
                declare("the step that is searched", message.step.rules)
                evaluators[message.name] = Evaluator(*message[1:])
                continue
            begin = monotonic()
            found = evaluators[message.name].within(message.strategy, message.most)
            connection.send(PlannedAhead(found, monotonic() - begin))
