"""Signatures of groups of ops: what the layouts of whole axes do not reach, tried in the time that is left.

A group is the same op at the same place of each repeated block. A move gives all its calls one signature of the op's
rule, or the one that deduction finds again; it is kept as Metropolis keeps it (Jia, Zaharia and Aiken, arXiv
1807.05358, section 5), with a temperature that is a part of the best step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from random import Random
from typing import final

from weft.errors import RuleError
from weft.ir.logical import Call
from weft.ir.queries.op_calls import op_call
from weft.ops import signatures
from weft.planning.stored_step import StoredStep
from weft.search.enumeration import Enumeration
from weft.search.evaluator import Measures
from weft.strategy.strategy import Strategy

# A step that is longer by this part is kept with a probability of 1 / e.
_TEMPERATURE = 0.02
# So many moves that are not kept, one after the other, and the chain begins again at the best.
_PATIENCE = 20


@final
@dataclass(frozen=True)
class Group:
    """Calls of one op at the same place of blocks.

    Attributes:
        name: of the first call's first result.
        calls: the names of their first results.
        signatures: that the op's rule has, as text.
    """

    name: str
    calls: tuple[str, ...]
    signatures: tuple[str, ...]


def improved(
    found: Enumeration, step: StoredStep, seed: int, told: Callable[[Enumeration], None]
) -> None:
    """Try signatures of groups of ops on the best strategy, as long as the budget lasts.

    Args:
        found: so far; what is tried is kept there.
        step: that is searched for.
        seed: of the moves.
        told: is told what is known, after each.
    """
    if found.best is None or not found.affords():
        return
    groups = [each for each in groups_of(step, found) if each.signatures]
    random = Random(seed)
    _, strategy, here = found.best
    axes, since = max(len(strategy.grid), 1), 0
    if not groups or here.exposed <= 0:
        return  # no exchange could become hidden, and work is divided evenly already
    while found.affords() and since < 4 * _PATIENCE:
        group = random.choice(groups)
        fixed = _with(strategy, group, _drawn(random, group, axes))
        best = found.best[2].seconds
        answer = found.plan(f"{found.best[0].partition(';')[0]}; {group.name}", fixed)
        told(found)
        since += 1
        if not isinstance(answer, Measures):
            continue
        if found.best[2].seconds < best:
            since = 0
        worse = (answer.seconds - here.seconds) / best
        if worse <= 0 or random.random() < exp(-worse / _TEMPERATURE):
            strategy, here = fixed, answer
        if since and since % _PATIENCE == 0:
            _, strategy, here = found.best


def _drawn(random: Random, group: Group, axes: int) -> tuple[str, ...] | None:
    """A signature for each axis; None for what deduction finds."""
    if random.random() < 0.2:
        return None
    return tuple(random.choice(group.signatures) for _ in range(axes))


def _with(strategy: Strategy, group: Group, drawn: tuple[str, ...] | None) -> Strategy:
    rest: Mapping[str, str | tuple[str, ...]] = {
        name: text for name, text in strategy.signatures.items() if name not in group.calls
    }
    if drawn is None:
        return replace(strategy, signatures=rest)
    text = drawn[0] if len(drawn) == 1 else drawn
    return replace(strategy, signatures={**rest, **dict.fromkeys(group.calls, text)})


def groups_of(step: StoredStep, found: Enumeration) -> Sequence[Group]:
    """The groups of a step, in the order of its graph."""
    blocks = found.facts.blocks
    seen: dict[tuple[str, str, int, bool], list[Call]] = {}
    places: dict[tuple[str, bool], int] = {}
    for call in step.graph.of_kind(Call):
        if call.hint is not None or not call.makes:
            continue
        module = call.location.module if call.location is not None else ""
        number = blocks.of(module) if blocks is not None else None
        forward = call.phase.kind == "forward"
        place = places[module, forward] = places.get((module, forward), -1) + 1
        if number is not None and blocks is not None:
            module = f"*{module.removeprefix(blocks.path(number))}"
        seen.setdefault((call.op, module, place, forward), []).append(call)
    return [Group(own[0].makes[0].name, _names(own), _legal(step, own[0])) for own in seen.values()]


def _names(calls: Sequence[Call]) -> tuple[str, ...]:
    return tuple(call.makes[0].name for call in calls)


def _legal(step: StoredStep, call: Call) -> tuple[str, ...]:
    try:
        return tuple(map(str, signatures(op_call(step.graph, call), 2)))
    except RuleError:
        return ()
