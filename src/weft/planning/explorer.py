"""Delta planning: a step is planned and simulated again and again, each time with a little of it different.

It stands here, above compiler and simulator, since it uses both. Only what a move changes is made anew: the passes keep
what they made (`weft.compiler.kept`), so that answers are those of a full plan and a full simulation, to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

import yaml

from weft.actors.simulate import simulate as run_actors
from weft.compiler.kept import KeptResults
from weft.errors import InternalError, StrategyError, UserError
from weft.hardware.topology import Topology
from weft.ir.plan import RankPlan
from weft.layout import Placement
from weft.planning.machine import machine_of, placement_on
from weft.planning.moves import Candidate, Move, OtherStrategy
from weft.planning.plans import PricedStep, plan_stored, priced_step
from weft.planning.progress import uncollected
from weft.planning.simulated import planned_step
from weft.planning.stored_step import StoredStep
from weft.simulator.results.simulation import Simulation
from weft.simulator.steps.acts import ActCosts
from weft.simulator.steps.planned import PlannedStep, step_flops
from weft.strategy.strategy import Strategy
from weft.strategy.text import plain
from weft.units import Seconds

# Results that are kept of each pass, and moves that can be undone.
KEPT, UNDONE = 8, 8


@final
class Explorer:
    """Plans and simulates candidates for a step, one move after the other.

    Args:
        step: the captured step.
        start: the strategy, or the candidate, to begin with.
        topology: a name of the catalogue, the path of a `.yaml` file, or a topology.
        grid: the number of ranks along each axis of the strategy, as long as it has the stages that it begins with; by
            default, and with other stages, as `placement_on` takes it.
        kept: results that are kept of each pass; 0 plans and simulates everything anew.

    Raises:
        UserError: when the step cannot be planned so.
    """

    def __init__(
        self,
        step: StoredStep,
        start: Strategy | Candidate,
        topology: str | Path | Topology,
        *,
        grid: Sequence[int] = (),
        kept: int = KEPT,
    ) -> None:
        machine = machine_of(topology)
        self._step, self._machine, self._costs = step, machine, machine.costs
        self._candidate = Candidate(start) if isinstance(start, Strategy) else start
        self._grid, self._stages = tuple(grid), self._candidate.strategy.stages
        self._kept = KeptResults(kept)
        self._before: deque[tuple[Candidate, PricedStep]] = deque(maxlen=UNDONE)
        self._now = self._planned(self._candidate)

    @property
    def candidate(self) -> Candidate:
        """The candidate as it is now."""
        return self._candidate

    @property
    def plans(self) -> Sequence[RankPlan]:
        """The plans of the ranks that stand for all."""
        return self._now.step.plans

    @property
    def seconds(self) -> Seconds:
        """Seconds of a step, as it is decided now."""
        return self._now.ran.step_seconds

    @property
    def simulation(self) -> Simulation:
        """All that is known of the step, as it is decided now: what `weft.simulate` gives."""
        with uncollected():
            return self._now.simulation

    def lower_bound(self, move: Move, *, planned: bool = False) -> Seconds:
        """Seconds that a step takes at least after a move, before it is simulated. Changes nothing.

        Args:
            move: the change.
            planned: false for what is known without planning: the operations of the step, done by all devices at
                their best. True for the busiest queue of the plans, which `apply` uses again.

        Raises:
            UserError: when the step cannot be planned so.
        """
        candidate = move.on(self._candidate)
        return self._planned(candidate).bound() if planned else self._least(candidate.strategy)

    def _least(self, strategy: Strategy) -> Seconds:
        """The operations of the step over those that all devices can do in a second, in any dtype."""
        peaks = [self._costs.capacity(rank).peaks for rank in self._placement(strategy).ranks]
        if not all(peaks):
            return Seconds(0.0)
        work, _ = step_flops(self._step.graph)
        return Seconds(work / sum(max(each.values()) for each in peaks))

    def apply(self, move: Move) -> Seconds:
        """Seconds of a step after a move, which counts from now on.

        Raises:
            UserError: when the step cannot be planned so; nothing has changed then.
        """
        candidate = move.on(self._candidate)
        planned = self._planned(candidate)
        try:
            seconds = planned.ran.step_seconds
        except InternalError as error:
            raise StrategyError(f"{move}: the plans get stuck ({error}); use more copies") from None
        self._before.append((self._candidate, self._now))
        self._candidate, self._now = candidate, planned
        return seconds

    def undo(self) -> Seconds:
        """Take back the last move, of the last `UNDONE`; seconds of a step without it.

        Raises:
            StrategyError: when there is none.
        """
        if not self._before:
            raise StrategyError("there is no move to undo; use apply first")
        self._candidate, self._now = self._before.pop()
        return self.seconds

    def _planned(self, candidate: Candidate) -> PricedStep:
        # Patterns count in their order, which equal mappings need not have.
        given = candidate, str(candidate.strategy)
        with uncollected():
            return self._kept.of("candidate", given, lambda: self._make(candidate))

    def _placement(self, strategy: Strategy) -> Placement:
        """The ranks of a strategy: the grid that was given holds for the stages that it was given with."""
        grid = self._grid if strategy.stages == self._stages else ()
        return placement_on(self._machine.device_type, self._machine.devices, strategy, grid)

    def _make(self, candidate: Candidate) -> PricedStep:
        placement = self._placement(candidate.strategy)
        compiled = plan_stored(
            self._step,
            candidate.strategy,
            placement,
            kinds=self._machine.kinds(placement.ranks),
            costs=self._machine.planned,
            kept=self._kept,
        )
        priced = priced_step(planned_step(self._step.graph, compiled, self._kept), self._costs)
        if candidate.credits:
            step = with_credits(priced.step, priced.acts, candidate.credits)
            return replace(priced, step=step)
        return priced


def with_credits(
    step: PlannedStep, acts: ActCosts, credits: Mapping[tuple[int, str], int]
) -> PlannedStep:
    """A planned step whose registers have other copies.

    Args:
        step: as it is planned.
        acts: what its acts cost.
        credits: by rank and register.

    Raises:
        StrategyError: when a rank has no such register, or has so few copies that it gets stuck.
    """
    plans = {plan.rank: plan for plan in step.plans}
    for (rank, name), copies in credits.items():
        plan = plans.get(rank)
        if plan is None or name not in plan.register_of:
            raise StrategyError(
                f"there is no register {name!r} on rank {rank} of the plan; use a rank that stands for others "
                f"({', '.join(map(str, plans))}) and one of its registers"
            )
        registers = [
            replace(each, credits=copies) if each.value.name == name else each
            for each in plan.registers
        ]
        plans[rank] = replace(plan, registers=tuple(registers))
    every = tuple(plans.values())
    seconds = {plan.rank: acts.seconds(plan.rank) for plan in every}
    try:
        run_actors(every, seconds, fixed=True)
    except InternalError as error:
        raise StrategyError(f"with these copies the plans get stuck ({error}); use more") from None
    return replace(step, plans=every)


# Characters of an entry that are shown.
_SHOWN = 60


@final
@dataclass(frozen=True)
class Difference:
    """An entry in which two strategies differ.

    Attributes:
        name: of the entry, as in strategy files.
        first, second: what each strategy says, as text.
        seconds: of a step of the first strategy with this entry of the second; None where it cannot be planned so.
        why: why not.
    """

    name: str
    first: str
    second: str
    seconds: Seconds | None
    why: str = ""


@final
@dataclass(frozen=True)
class Differences:
    """Two strategies on one machine.

    Attributes:
        first, second: their simulations.
        entries: in which they differ.
    """

    first: Simulation
    second: Simulation
    entries: tuple[Difference, ...]

    def __str__(self) -> str:
        """A line for each strategy, then for each entry what it costs or saves by itself."""
        before, after = self.first.step_seconds, self.second.step_seconds
        lines = [
            f"first:  {1e3 * before:.3f} ms a step, {_memory(self.first)}",
            f"second: {1e3 * after:.3f} ms a step, {_memory(self.second)}; {_by(after, before)}",
        ]
        if not self.entries:
            return "\n".join([*lines, "the strategies do not differ"])
        for each in self.entries:
            effect = (
                f"not by itself: {each.why}"
                if each.seconds is None
                else f"by itself {_by(each.seconds, before)}"
            )
            lines.append(f"{each.name}: {_short(each.first)} -> {_short(each.second)}")
            lines.append(f"    {effect}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All of it as lists, dicts, numbers and texts; seconds and bytes."""
        return {
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "entries": [
                {each.name: getattr(one, each.name) for each in fields(one)} for one in self.entries
            ],
        }


def differences(
    step: StoredStep, first: Strategy, second: Strategy, topology: str | Path | Topology
) -> Differences:
    """Simulate two strategies, and the first one with each entry that the second one has otherwise.

    Effects of single entries need not add up: some hang together, such as stages and micro-batches.

    Args:
        step: from a graph file.
        first, second: the strategies.
        topology: the machine, as `weft.simulate` takes it.

    Raises:
        UserError: one of the two cannot be planned, or the topology is unknown.
    """
    explorer = Explorer(step, first, topology)
    before = explorer.simulation
    names = [
        each.name
        for each in fields(Strategy)
        if _said(first, each.name) != _said(second, each.name)
    ]
    entries = tuple(_entry(explorer, first, second, name, names) for name in names)
    explorer.apply(OtherStrategy(second))
    return Differences(before, explorer.simulation, entries)


def _entry(
    explorer: Explorer, first: Strategy, second: Strategy, name: str, names: Sequence[str]
) -> Difference:
    """An entry of the second strategy in the first one, planned and taken back."""
    said = _said(first, name), _said(second, name)
    try:
        other = replace(first, **{name: getattr(second, name)})
        seconds = explorer.apply(OtherStrategy(other))
    except UserError as error:
        others = ", ".join(each for each in names if each != name)
        together = f" (with {others}, perhaps)" if others else ""
        return Difference(name, *said, None, f"{str(error).splitlines()[0]}{together}")
    explorer.undo()
    return Difference(name, *said, seconds)


def _said(strategy: Strategy, name: str) -> str:
    """An entry as strategy files have it, in one line; patterns in their order, which counts."""
    found = plain(name, getattr(strategy, name))
    text = yaml.safe_dump(found, sort_keys=False, default_flow_style=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _by(seconds: float, before: float) -> str:
    """The difference of two times, in words."""
    part = seconds / before - 1
    if seconds == before:
        return "no change"
    return f"{1e3 * abs(seconds - before):.3f} ms {'more' if part > 0 else 'less'} ({part:+.1%})"


def _memory(simulation: Simulation) -> str:
    found = simulation.memory
    if found is None:
        return "memory not known"
    fits = "" if found.fits else ", which does not fit"
    return f"{found.total / 1e9:.2f} GB{fits}"
