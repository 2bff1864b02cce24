"""Differences of two strategies for a step on a machine, and the cost or saving of each.

Strategies that differ little are planned one after the other with cached passes (`weft.compiler.pass_cache`); the
answers equal those of fresh plans to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

import yaml

from weft.compiler.pass_cache import KEPT, PassCache
from weft.errors import UserError
from weft.hardware.topology import Topology
from weft.planning.machine import machine_of, placement_on
from weft.planning.plans import PricedStep, plan_stored, planned_step, priced_step
from weft.planning.progress import uncollected
from weft.planning.stored_step import StoredStep
from weft.simulator.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.strategy.text import plain
from weft.units import Seconds

# Characters of an entry that are shown.
_SHOWN = 60


@final
@dataclass(frozen=True)
class Difference:
    """An entry in which two strategies differ.

    Attributes:
        name: of the entry, as in strategy files.
        first, second: what each strategy says, as text.
        seconds: of a step of the first strategy with this entry of the second; None if it cannot be planned.
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
        """The differences as lists, dicts, numbers and strings; seconds and bytes."""
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
    """Simulate two strategies, and the first with each entry in which the second differs.

    Effects of single entries need not add up: some depend on each other, such as stages and micro-batches.

    Args:
        step: from a graph file.
        first, second: the strategies.
        topology: the machine, as `weft.simulate` takes it.

    Raises:
        UserError: one of the two cannot be planned, or the topology is unknown.
    """
    machine, cache = machine_of(topology), PassCache(KEPT)

    def priced(strategy: Strategy) -> PricedStep:
        placement = placement_on(machine.device_type, machine.devices, strategy)
        kinds = machine.kinds(placement.ranks)
        compiled = plan_stored(
            step, strategy, placement, kinds=kinds, costs=machine.planned, cache=cache
        )
        return priced_step(planned_step(step.graph, compiled, cache), machine.costs)

    names = [
        each.name
        for each in fields(Strategy)
        if _said(first, each.name) != _said(second, each.name)
    ]
    entries = []
    with uncollected():
        before = priced(first).simulation
        for name in names:
            said = _said(first, name), _said(second, name)
            try:
                other = replace(first, **{name: getattr(second, name)})
                entries.append(Difference(name, *said, priced(other).ran.step_seconds))
            except UserError as error:
                others = ", ".join(each for each in names if each != name)
                together = f" (with {others}, perhaps)" if others else ""
                why = f"{str(error).splitlines()[0]}{together}"
                entries.append(Difference(name, *said, None, why))
        return Differences(before, priced(second).simulation, tuple(entries))


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
