"""The table "why not" of strategies that people write by hand: of each kind the best known, and what it loses by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias, final

import numpy as np

from weft.ir.logical import Input, LogicalGraph
from weft.layout import Split
from weft.patterns import first_match
from weft.search.candidate import Candidate
from weft.search.candidate_table import KINDS, CandidateTable, Floats, kinds_of
from weft.search.measures import Measures, Unplannable
from weft.search.steps.linears import experts_of, vocabularies
from weft.strategy.strategy import Strategy
from weft.strategy.text import sbps_of
from weft.units import Bytes, Seconds

# How well the figures are known: of the whole plan; on a line through plans of few blocks; no plan takes less.
Known: TypeAlias = Literal["simulated", "estimated", "at least"]


@final
@dataclass(frozen=True)
class WhyNot:
    """A kind of strategy that people write by hand, by the best of it that is known.

    Attributes:
        kind: "data parallel", "ZeRO 1", "Megatron grid", "1F1B", …
        name: a readable name of the strategy.
        known: the source of its figures.
        seconds: of a step.
        memory: bytes on the rank with the least room, with what its device reserves.
        why: the term that loses against the best; "" if none does.
    """

    kind: str
    name: str
    known: Known
    seconds: Seconds
    memory: Bytes
    why: str

    def __str__(self) -> str:
        took = f"{1e3 * self.seconds:.3f} ms"
        return (
            f"{self.kind:<14} {self.name:<44} {took:>14} {self.memory / 1e9:>8.2f} GB  {self.known:<9}  {self.why}"
        ).rstrip()


@final
@dataclass(frozen=True)
class Sources:
    """The sources of figures of candidates.

    Attributes:
        simulated: candidates that were planned.
        looked_at: candidates without stages that were looked at.
        estimated: gives the measures of a candidate that was looked at; None for others.
        least: seconds that candidates take at least.
        held: bytes that candidates take at least.
        limit: bytes of memory; None if it is not known.
    """

    simulated: Mapping[Candidate, Measures | Unplannable]
    looked_at: Collection[Candidate]
    estimated: Callable[[Candidate], Measures | None]
    least: Callable[[CandidateTable], Floats]
    held: Callable[[CandidateTable], Floats]
    limit: int | None


def why_not(table: CandidateTable, best: Measures, sources: Sources) -> tuple[WhyNot, ...]:
    """The rows of all kinds that these candidates have."""
    kinds = kinds_of(table)
    every = ((kind, table.where(kinds == number)) for number, kind in enumerate(KINDS))
    return tuple(_of_kind(kind, own, best, sources) for kind, own in every if len(own))


def _of_kind(kind: str, table: CandidateTable, best: Measures, sources: Sources) -> WhyNot:
    known = [candidate for candidate in sources.simulated if table.number(candidate) is not None]
    flat = [table.where(table.flat_as(each)) for each in sources.looked_at]
    known += [candidate for each in flat for candidate in each]
    rows = {candidate: _known(kind, candidate, best, sources) for candidate in dict.fromkeys(known)}
    found = [row for row in rows.values() if row is not None]
    rest = table.without([candidate for candidate, row in rows.items() if row is not None])
    found += [_at_least(kind, rest, best, sources)] if len(rest) else []
    limit = inf if sources.limit is None else sources.limit

    def place(row: WhyNot) -> tuple[bool, bool, float]:
        fits = row.memory <= limit
        return not fits, row.known == "at least", row.seconds if fits else row.memory

    return min(found, key=place)


def _known(kind: str, candidate: Candidate, best: Measures, sources: Sources) -> WhyNot | None:
    found, known = sources.simulated.get(candidate), "simulated"
    if not isinstance(found, Measures):
        found, known = sources.estimated(candidate), "estimated"
    if not isinstance(found, Measures):
        return None
    over = too_much(found.memory, sources.limit)
    slower = found.seconds > best.seconds
    why = over or (loses_by(found, best) if slower else "")
    return WhyNot(kind, str(candidate), known, found.seconds, found.memory, why)  # type: ignore[arg-type]


def _at_least(kind: str, table: CandidateTable, best: Measures, sources: Sources) -> WhyNot:
    """The one that is not ruled out, or rules out all: of those that may have room the fastest."""
    least, held = sources.least(table), sources.held(table)
    over = held > (inf if sources.limit is None else sources.limit)
    number = int(np.lexsort((np.where(over, held, least), over))[0])
    seconds, memory = Seconds(float(least[number])), Bytes(int(held[number]))
    why = too_much(memory, sources.limit)
    if not why:
        why = "no quicker, whatever its plan" if seconds >= best.seconds else "not reached"
    return WhyNot(kind, str(table.candidate(number)), "at least", seconds, memory, why)


@final
@dataclass(frozen=True)
class Probed:
    """A strategy that a search probed.

    Attributes:
        after: seconds since the search began.
        chain: the part of the search: "points", or a descent or a chain of moves with its number.
        seconds: of a step; None if the strategy was refused, has no room, or takes longer than was asked.
        best: of a step with the best strategy so far; None if nothing fits yet.
        bound: that any strategy takes at least, as far as was known.
    """

    after: Seconds
    chain: str
    seconds: Seconds | None
    best: Seconds | None
    bound: Seconds


def too_much(memory: Bytes, limit: int | None) -> str:
    """Memory that is lacking, in words; "" if it suffices."""
    fits = limit is None or memory <= limit
    return "" if fits else f"{(memory - (limit or 0)) / 1e9:.2f} GB too much"


def loses_by(found: Measures, best: Measures) -> str:
    """The term that loses most against the best, in words."""
    terms = {
        "computing": found.computing - best.computing,
        "exchanges that nothing hides": found.exposed - best.exposed,
        "waiting": found.idle - best.idle,
    }
    term = max(terms, key=lambda each: terms[each])
    return f"{1e3 * terms[term]:.3f} ms more {term}"


def split_parameters(graph: LogicalGraph, strategy: Strategy) -> frozenset[tuple[str, int]]:
    """The families of parameters that a strategy splits by name, and the dimensions; () if all are whole.

    For layers that are neither vocabularies nor experts the dimension does not matter: 0.
    """
    named = dict.fromkeys(experts_of(graph).parameters, "experts")
    named |= dict.fromkeys(vocabularies(graph), "vocabularies")
    found = set[tuple[str, int]]()
    for node in graph.of_kind(Input):
        pattern = first_match(strategy.parameters, node.key) if node.role == "parameter" else None
        for sbp in () if pattern is None else sbps_of(strategy.parameters[pattern]):
            if isinstance(sbp, Split):
                family = named.get(node.key)
                found.add(("layers", 0) if family is None else (family, sbp.dim))
    return frozenset(found)
