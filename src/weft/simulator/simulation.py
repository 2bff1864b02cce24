"""Simulation: how long a step takes on a machine, why, and what its ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from weft.simulator.facts import LargestCost, MemoryUse, PathAct, RankTimes
from weft.traces.rows import RankTrace
from weft.units import Bytes, Flops, Seconds, bytes_text, seconds_text


@final
@dataclass(frozen=True)
class Simulation:
    """A simulated step. Prints as text.

    Attributes:
        step_seconds: seconds of a step when steps follow one another as fast as they can.
        first_seconds: seconds of the first step.
        steady: true if the last steps that were simulated took equally long.
        interval: 5th and 95th percentile of `step_seconds`, from how much costs vary; None if that is not known.
        devices: how many ranks there are.
        device: the names of their kinds.
        flops: operations of a step of the model without recomputation.
        peak_flops: operations a second of all devices at their best; None if that is not known.
        samples, tokens: of a step; 0 if that is not known.
        sent_bytes: bytes sent between ranks in a step, over all ranks.
        memory: of the fullest rank; None if no peak is known.
        ranks: the times of the representative ranks.
        costs: the largest, of the rank that computes longest.
        path: the critical path of the last step.
        estimates: figures that were missing and had to be guessed.
        traces: the timelines of the last step, of the representative ranks.
    """

    step_seconds: Seconds
    first_seconds: Seconds
    steady: bool
    interval: tuple[Seconds, Seconds] | None
    devices: int
    device: str
    flops: Flops
    peak_flops: float | None
    samples: int
    tokens: int
    sent_bytes: Bytes
    memory: MemoryUse | None
    ranks: tuple[RankTimes, ...]
    costs: tuple[LargestCost, ...]
    path: tuple[PathAct, ...]
    estimates: tuple[str, ...] = ()
    traces: tuple[RankTrace, ...] = field(default=(), repr=False, compare=False)

    @property
    def samples_per_second(self) -> float:
        """Samples a second, of all ranks; 0 if their number is not known."""
        return self.samples / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, of all ranks; 0 if there are none."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the model's operations a second over those that the devices could do.

        Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B. None if no peak is known.
        """
        if not self.peak_flops or not self.step_seconds:
            return None
        return self.flops / self.step_seconds / self.peak_flops

    @property
    def exposed(self) -> Seconds:
        """Seconds of a step in which compute queues wait while communicators act: the mean of all ranks."""
        return self._mean({each.rank: each.parts.exposed for each in self.ranks})

    @property
    def hidden(self) -> Seconds:
        """Seconds of a step in which communication runs beside computing: the mean of all ranks."""
        return self._mean({each.rank: each.parts.hidden for each in self.ranks})

    @property
    def bubble(self) -> float:
        """Part of the step in which compute queues do nothing: the mean of all ranks."""
        return float(self._mean({each.rank: Seconds(each.bubble) for each in self.ranks}))

    def _mean(self, of: Mapping[int, Seconds]) -> Seconds:
        count = sum(each.count for each in self.ranks)
        total = sum(each.count * of[each.rank] for each in self.ranks)
        return Seconds(total / count if count else 0.0)

    def to_json(self) -> dict[str, Any]:
        """The simulation as plain data: numbers, strings, lists; times in seconds, sizes in bytes."""
        found = asdict(self)
        del found["traces"]
        rates = ("samples_per_second", "tokens_per_second", "mfu", "exposed", "hidden", "bubble")
        found |= {name: getattr(self, name) for name in rates}
        if self.memory is not None:
            found["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        return found

    def __str__(self) -> str:
        lines = [*self._summary(), "", *ranks_table(self.ranks), ""]
        lines += costs_table(self.costs, self.step_seconds)
        if self.estimates:
            lines += ["", "estimated, since figures are missing:"]
            lines += [f"  {text}" for text in self.estimates]
        return "\n".join(lines) + "\n"

    def _summary(self) -> Iterator[str]:
        about = " (about: figures are missing)" if self.estimates else ""
        if self.interval is not None:
            low, high = map(seconds_text, self.interval)
            about += f", 90 % of steps between {low} and {high}"
        yield f"step        {seconds_text(self.step_seconds)}{about}"
        if not self.steady:
            first = seconds_text(self.first_seconds)
            yield f"            steps do not take equally long: this is their mean; the first takes {first}"
        yield f"devices     {self.devices} × {self.device}"
        if self.tokens:
            yield f"tokens      {self.tokens_per_second:,.0f} a second"
        if self.samples:
            rate = self.samples_per_second
            yield f"samples     {format(rate, ',.0f' if rate >= 1000 else '.4g')} a second"
        if self.mfu is not None:
            each = self.flops / self.step_seconds / self.devices / 1e12
            yield f"MFU         {100 * self.mfu:.1f} % ({each:.4g} TFLOP/s a device)"
        yield (
            f"exchanges   {seconds_text(self.exposed)} exposed, {seconds_text(self.hidden)} hidden, "
            f"{bytes_text(self.sent_bytes)} sent by all ranks together"
        )
        yield f"bubble      {100 * self.bubble:.1f} % of the time compute queues do nothing"
        if self.memory is not None:
            yield f"memory      {memory_text(self.memory)}"


# Ranks that are shown, at most.
_RANKS = 16


def memory_text(use: MemoryUse) -> str:
    """The bytes that the fullest rank takes, of how many."""
    text = f"{bytes_text(use.total)} on rank {use.rank}, the fullest"
    if use.reserve:
        text += f" ({bytes_text(use.reserve)} of it taken by the device itself)"
    if use.capacity is not None:
        verdict = "fits" if use.fits else "DOES NOT FIT"
        text += f", of {bytes_text(use.capacity)}: {verdict}"
    return text


def ranks_table(ranks: Sequence[RankTimes]) -> Iterator[str]:
    """The times of ranks, a line each."""
    rows: list[tuple[str, ...]] = [
        ("rank", "ranks", "compute", "communication", "hidden", "exposed", "bubble")
    ]
    for each in ranks[:_RANKS]:
        times = each.parts
        shown = (times.compute, times.communication, times.hidden, times.exposed)
        idle = f"{100 * each.bubble:.1f} %"
        rows.append((str(each.rank), f"× {each.count}", *map(seconds_text, shown), idle))
    yield from _table(rows)
    if len(ranks) > _RANKS:
        yield f"… and {len(ranks) - _RANKS} more"


def costs_table(costs: Sequence[LargestCost], step: Seconds) -> Iterator[str]:
    """The largest costs, a line each, with their share of a step."""
    rows = [("largest costs", "seconds", "of the step", "times", "where")]
    for each in costs:
        share = f"{100 * each.seconds / step:.1f} %" if step else ""
        about = " (estimated)" if each.estimated else ""
        took = seconds_text(each.seconds) + about
        rows.append((each.what, took, share, f"× {each.times}", each.where))
    yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
