"""What weft is to reach on each work and strategy, and what the rows say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

OWN = ("weft", "weft auto")
TRANSFORMERS = ("gpt", "bert")
LLAMAS = ("llama", "llama_tied")
# Two stages, eight micro-batches, a backward in two parts: (p - 1) / (3 m + p - 1) (Qi et al., arXiv
# 2401.10241, section 2); the target allows five points more.
BUBBLE = 1 / 25 + 0.05


@dataclass(frozen=True)
class Target:
    """Bounds for weft's fastest row of a work and strategy.

    Attributes:
        over_limit: the most that its time may be over the limit's.
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
    **{(work, "data_parallel"): Target(1.04, 1.0) for work in TRANSFORMERS},
    **{(work, "zero3"): Target(1.12, 1.15) for work in TRANSFORMERS},
    **{(work, "tensor_parallel"): Target(1.20, 1.20) for work in TRANSFORMERS},
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
        held: whether the bound is.
    """

    place: str
    what: str
    bound: str
    found: float | None
    held: bool


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One for each bound on what was measured; peak memory may be the best peer's at most."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["work"], row["strategy"], row["link"]), []).append(row)
    return [each for place, group in groups.items() for each in judge(*place, group)]


def judge(work: str, strategy: str, link: str, rows: Sequence[Row]) -> Iterator[Verdict]:
    place = "/".join((work, strategy) + ((link,) if link != "host" else ()))
    ran = {row["system"]: row for row in rows if "error" not in row}
    mine = [ran[name] for name in OWN if name in ran]
    if not mine:
        yield Verdict(place, "runs", "yes", None, False)
        return
    own = min(mine, key=lambda row: float(row["seconds"]))
    target = target_of(work, strategy, link)
    if target.over_limit:
        found = own["ratio_to_limit"]
        yield verdict(place, "time over the limit", found, most=target.over_limit)
    if target.against_peer:
        found = own["ratio_to_best_peer"]
        peer = own["best_peer"] or "the best peer"
        yield verdict(place, f"speed against {peer}", found, least=target.against_peer)
    for name, least in target.against.items():
        found = ran[name]["seconds"] / own["seconds"] if name in ran else None
        yield verdict(place, f"speed against {name}", found, least=least)
    for name, most in target.memory.items():
        found = own["peak_bytes"] / ran[name]["peak_bytes"] if name in ran else None
        yield verdict(place, f"memory over that of {name}", found, most=most)
    if own["best_peer"] in ran and own["best_peer"] not in target.memory:
        found = own["peak_bytes"] / ran[own["best_peer"]]["peak_bytes"]
        yield verdict(place, f"memory over that of {own['best_peer']}", found, most=1.0)


def target_of(work: str, strategy: str, link: str) -> Target:
    if link != "host":
        return ON_SLOW_LINK.get((work, strategy), SLOW_LINK)
    return ON_HOST.get((work, strategy), SINGLE if strategy == "single" else Target())


def verdict(
    place: str, what: str, found: float | None, most: float | None = None, least: float = 0.0
) -> Verdict:
    """With an upper or a lower bound; two decimals count."""
    bound = f"≤ {most:.2f}" if most is not None else f"≥ {least:.2f}"
    if found is None:
        return Verdict(place, what, bound, None, False)
    shown = round(found, 2)
    held = shown <= round(most, 2) if most is not None else shown >= least
    return Verdict(place, what, bound, found, held)
