"""What weft is to reach on each work and strategy, and what the rows say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pairs import RANKS, name_of

Row = Mapping[str, Any]

OWN = ("weft", "weft auto")
LLAMAS = ("llama", "llama_tied")
# Two stages, eight micro-batches, a backward in two parts: (p - 1) / (3 m + p - 1) (Qi et al., arXiv
# 2401.10241, section 2); the target allows two points more.
BUBBLE = 1 / 25 + 0.02


@dataclass(frozen=True)
class Target:
    """Bounds for weft's fastest row of a work and strategy; each pair has one of speed.

    Attributes:
        over_limit: the most that its time may be over the lowest limit's.
        against_peer: the least of the best peer's time over its own.
        against: the same for peers by name.
        memory: the most that its peak may be over that of peers by name.
    """

    over_limit: float | None = None
    against_peer: float | None = None
    against: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)


# Half of the experts on each of two ranks, and a tenth more.
EXPERTS = Target(against={"ddp": 1.0}, memory={"ddp": 0.55})
ON_HOST: dict[tuple[str, str], Target] = {
    **{
        (work, strategy): Target(over, faster)
        for work, over in (("gpt", 1.03), ("bert", 1.04))
        for strategy, faster in (("data_parallel", 1.0), ("zero3", 1.15), ("tensor_parallel", 1.20))
    },
    **{(work, "data_parallel"): Target(1.10, 1.0) for work in ("mlp", "lstm")},
    # DDP with statistics of each rank trains another program, and has less to do.
    ("resnet50", "data_parallel"): Target(1.10, against={"ddp synced": 1.0, "ddp": 1.0}),
    **{(work, "data_parallel"): Target(against_peer=1.0, against={"ddp": 1.1}) for work in LLAMAS},
    **{(work, "zero3"): Target(against_peer=1.0, against={"fsdp2": 1.2}) for work in LLAMAS},
    ("llama", "tensor_parallel"): Target(against_peer=1.2),
    ("mixtral", "expert"): EXPERTS,
    ("gpt8", "pipeline"): Target(1 / (1 - BUBBLE), 1.05),
    **{(work, "split"): Target(against_peer=1.3) for work in ("wide_deep", "split_softmax")},
    **{
        (work, "single"): Target(against={"eager": 1.5, "torch.compile": 1.0})
        for work in ("lstm", "lstm_cells", "mlp_small")
    },
}
SINGLE = Target(against_peer=0.98)
OTHERS = Target(against_peer=1.0)
SLOW_LINK = Target(against_peer=1.2)
ON_SLOW_LINK: dict[tuple[str, str], Target] = {
    ("llama", "data_parallel"): Target(against_peer=1.1),
    ("llama", "zero3"): Target(against_peer=1.3),
    ("mixtral", "expert"): EXPERTS,
}


@dataclass(frozen=True)
class Verdict:
    """One bound, and what was found.

    Attributes:
        place: work, strategy and link.
        what: is bounded.
        bound: as text, "≥ 1.15".
        found: the figure, or None where a system did not run.
        held: whether the bound is; None where the interval does not decide.
        interval: in which the figure lies; None where it is exact, or where there are too few rounds.
    """

    place: str
    what: str
    bound: str
    found: float | None
    held: bool | None
    interval: Sequence[float] | None = None


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One for each bound on what was measured; peak memory may be the best peer's at most."""
    groups: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        place = row["work"], row["strategy"], row["link"], row.get("ranks", RANKS)
        groups.setdefault(place, []).append(row)
    return [each for place, group in groups.items() for each in judge(*place, group)]


def judge(
    work: str, strategy: str, link: str, ranks: int, rows: Sequence[Row]
) -> Iterator[Verdict]:
    place = name_of(work, strategy, link, ranks)
    ran = {row["system"]: row for row in rows if "error" not in row}
    mine = [ran[name] for name in OWN if name in ran]
    if not mine:
        yield Verdict(place, "runs", "yes", None, False)
        return
    own = min(mine, key=lambda row: float(row["seconds"]))
    target = target_of(work, strategy, link, ranks)
    quiet = not own["disturbed"]
    if target.over_limit:
        time = Figure(own["ratio_to_limit"], own["limit_interval"], quiet)
        limit = own["limit"] or "the limit"
        yield verdict(place, f"time over {limit}", time, most=target.over_limit)
    if target.against_peer:
        speed = Figure(own["ratio_to_best_peer"], own["ratio_interval"], quiet)
        peer = own["best_peer"] or "the best peer"
        yield verdict(place, f"speed against {peer}", speed, least=target.against_peer)
    for name, least in target.against.items():
        known = own["against"].get(name, {"ratio": None, "interval": None})
        speed = Figure(known["ratio"], known["interval"], quiet)
        yield verdict(place, f"speed against {name}", speed, least=least)
    for name, most in target.memory.items():
        bytes_ = exact(own["peak_bytes"] / ran[name]["peak_bytes"] if name in ran else None)
        yield verdict(place, f"memory over that of {name}", bytes_, most=most)
    if own["best_peer"] in ran and own["best_peer"] not in target.memory:
        bytes_ = exact(own["peak_bytes"] / ran[own["best_peer"]]["peak_bytes"])
        yield verdict(place, f"memory over that of {own['best_peer']}", bytes_, most=1.0)
    if "resident_bytes" in own and own["best_peer"] in ran:
        held = ran[own["best_peer"]]["resident_bytes"]
        bytes_ = exact(own["resident_bytes"] / held)
        yield verdict(place, f"resident memory over that of {own['best_peer']}", bytes_, most=1.0)


def target_of(work: str, strategy: str, link: str, ranks: int = RANKS) -> Target:
    if link != "host":
        return ON_SLOW_LINK.get((work, strategy), SLOW_LINK)
    if ranks > RANKS:
        return OTHERS
    return ON_HOST.get((work, strategy), SINGLE if strategy == "single" else OTHERS)


@dataclass(frozen=True)
class Figure:
    """A figure that is bounded.

    Attributes:
        value: None where a system did not run.
        interval: in which it lies; None where that is not known.
        quiet: whether nothing disturbed the rounds that it is of.
    """

    value: float | None
    interval: Sequence[float] | None
    quiet: bool = True


def exact(value: float | None) -> Figure:
    """A figure that every run shows, of which two decimals count."""
    return Figure(value, None if value is None else (round(value, 2),) * 2)


def verdict(
    place: str, what: str, figure: Figure, most: float | None = None, least: float = 0.0
) -> Verdict:
    """With an upper or a lower bound, as it is printed, where all of the interval, as it is, lies to one side of it."""
    bound = f"≤ {most:.2f}" if most is not None else f"≥ {least:.2f}"
    if figure.value is None:
        return Verdict(place, what, bound, None, False)
    held = None
    if figure.quiet and figure.interval is not None:
        good = [
            end <= round(most, 2) if most is not None else end >= round(least, 2)
            for end in figure.interval
        ]
        held = good[0] if len(set(good)) == 1 else None
    width = figure.interval and figure.interval[1] > figure.interval[0]
    return Verdict(place, what, bound, figure.value, held, figure.interval if width else None)
