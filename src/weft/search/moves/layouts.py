"""Moves of layouts: signatures of groups of ops and of single ones, along edges, parameters, leaves of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from random import Random
from typing import Any, TypeAlias, final

from weft.cached import cached_property
from weft.ir.logical import Input
from weft.layout import SBP, broadcast, split
from weft.ops import Signature
from weft.planning.stored_step import StoredStep
from weft.search.moves.groups import (
    Group,
    GroupEdge,
    edges_of,
    groups_of,
    legal_signatures_of,
    places_of,
)
from weft.search.moves.sequences import MadeLater, StrategyMove, chained
from weft.search.steps.repeated import Blocks
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs

# For each axis.
Signatures: TypeAlias = tuple[Signature, ...]


@final
@dataclass(frozen=True)
class LayoutMoves:
    """The moves of layouts on one grid of ranks.

    Attributes:
        step: as it was captured.
        blocks: that come again in it.
        grid: the number of ranks along each axis.
        base: entries that hold for every strategy.
    """

    step: StoredStep
    blocks: Blocks | None
    grid: tuple[int, ...]
    base: Strategy

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of calls whose signatures are not fixed."""
        fixed = frozenset(self.base.signatures)
        found = groups_of(self.step.graph, self.blocks)
        return tuple(each for each in found if fixed.isdisjoint(each.calls))

    @cached_property
    def edges(self) -> tuple[GroupEdge, ...]:
        """Between those groups."""
        return edges_of(self.step.graph, self.groups)

    @cached_property
    def _legal(self) -> Mapping[int, Mapping[str, tuple[Signature, ...]]]:
        return {parts: legal_signatures_of(self.step.graph, parts) for parts in set(self.grid)}

    def signatures(self, call: str) -> Iterator[Signatures]:
        """All signatures of a call: of each axis every one; along an axis of one rank all are the same."""
        return product(*self._every(call))

    def _every(self, call: str) -> tuple[tuple[Signature, ...], ...]:
        """The signatures of a call along each axis."""
        return tuple(self._legal[parts][call][: None if parts > 1 else 1] for parts in self.grid)

    @cached_property
    def groupwise(self) -> Sequence[StrategyMove]:
        """Every signature of every group, and none."""
        none = StrategyMove("no signature fixed", partial(_with_none, keep=self.base.signatures))
        return chained(((none,), *(self._of_calls(each.name, each.calls) for each in self.groups)))

    @cached_property
    def single(self) -> Sequence[StrategyMove]:
        """Every signature of every single call of a group of several."""
        several = (group for group in self.groups if len(group.calls) > 1)
        calls = (call for group in several for call in group.calls)
        return chained(self._of_calls(f"only {call}", (call,)) for call in calls)

    def _of_calls(self, name: str, calls: tuple[str, ...]) -> Sequence[StrategyMove]:
        """The deduced signatures, then each that is legal, where there are several."""
        every = self._every(calls[0])
        count = prod(map(len, every))

        def made(number: int) -> StrategyMove:
            if not number:
                return StrategyMove(f"{name} deduced", partial(_signed, calls=calls, text=None))
            return self._signed(name, calls, _nth(every, number - 1))

        return MadeLater(count + 1 if count > 1 else 0, made)

    def _signed(self, name: str, calls: tuple[str, ...], each: Signatures) -> StrategyMove:
        texts = tuple(map(str, each))
        text = texts[0] if len(texts) == 1 else texts
        return StrategyMove(f"{name} {' | '.join(texts)}", partial(_signed, calls=calls, text=text))

    def drawn_along_edge(self, random: Random) -> StrategyMove | None:
        """Both ends of an edge with signatures that agree on what goes along it; None where none was drawn.

        Large edges are drawn more often: the largest of two.
        """
        if not self.edges:
            return None
        edge = self.edges[min(random.randrange(len(self.edges)) for _ in range(2))]
        calls = {group.name: group.calls for group in self.groups}
        every = tuple(self.signatures(edge.source))
        if not every:
            return None
        source = random.choice(every)
        fitting = [each for each in self.signatures(edge.target) if _agree(edge, source, each)]
        if not fitting:
            return None
        one = self._signed(edge.source, calls[edge.source], source)
        two = self._signed(edge.target, calls[edge.target], random.choice(fitting))
        return StrategyMove(f"{one.name}, {two.name}", partial(_both, one.on, two.on))

    @cached_property
    def tensors(self) -> tuple[StrategyMove, ...]:
        """Every layout of the parameters of one name in all blocks, the largest first; of the batch; of single ones.

        Layouts that are left to deduction come last: plans of these take longest.
        """
        shapes = self._shapes("parameter")
        patterns = sorted(
            places_of(shapes, self.blocks).items(),
            key=lambda each: -sum(prod(shapes[name]) for name in each[1]),
        )
        single = [name for _, names in patterns if len(names) > 1 for name in names]
        tensors = [
            *(("parameters", pattern, shapes[names[0]]) for pattern, names in patterns),
            *(("batch", *each) for each in self._leaves()),
            *(("parameters", name, shapes[name]) for name in single),
        ]
        free = [each for each in tensors if each[1] not in getattr(self.base, each[0])]
        said = [move for each in free for move in self._of_tensor(*each)]
        return (*said, *(self._deduced(entry, pattern) for entry, pattern, _ in free))

    def _leaves(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Patterns of the batch's leaves, and their shapes; of all, the least in each dimension that all have."""
        shapes = self._shapes("batch")
        dims = min((len(shape) for shape in shapes.values()), default=0)
        if dims:
            yield "*", tuple(map(min, zip(*shapes.values(), strict=False)))
        if len(shapes) > 1:
            yield from shapes.items()

    def _deduced(self, entry: str, pattern: str) -> StrategyMove:
        fixed: Mapping[str, SBPs] = getattr(self.base, entry)
        return StrategyMove(f"{pattern} deduced", partial(_laid, entry, pattern, None, fixed))

    def _of_tensor(self, entry: str, pattern: str, shape: Sequence[int]) -> Iterator[StrategyMove]:
        fixed: Mapping[str, SBPs] = getattr(self.base, entry)
        for sbps in product(*(_choices(shape, parts) for parts in self.grid)):
            said = sbps[0] if len(sbps) == 1 else sbps
            name = f"{pattern} {', '.join(map(str, sbps))}"
            yield StrategyMove(name, partial(_laid, entry, pattern, said, fixed))

    def _shapes(self, role: str) -> dict[str, tuple[int, ...]]:
        return {
            node.key: tuple(node.value.shape)
            for node in self.step.graph.of_kind(Input)
            # Recurrent layers lie as they were captured.
            if node.role == role and node.value.shape and node.key not in self.step.recurrent
        }


def _choices(shape: Sequence[int], parts: int) -> list[SBP]:
    """Layouts of a stored tensor along an axis."""
    if parts == 1:
        return [broadcast]
    return [broadcast, *(split(dim) for dim, size in enumerate(shape) if size >= parts)]


def _agree(edge: GroupEdge, source: Signatures, target: Signatures) -> bool:
    return all(
        edge.result < len(one.results)
        and edge.operand < len(two.operands)
        and one.results[edge.result] == two.operands[edge.operand]
        for one, two in zip(source, target, strict=True)
    )


def _nth(every: tuple[tuple[Signature, ...], ...], number: int) -> Signatures:
    """The combination of a number, in the order of `itertools.product`."""
    found = []
    for options in reversed(every):
        number, place = divmod(number, len(options))
        found.append(options[place])
    return tuple(reversed(found))


def _both(
    first: Callable[[Strategy], Strategy],
    second: Callable[[Strategy], Strategy],
    strategy: Strategy,
) -> Strategy:
    return second(first(strategy))


def _with_none(strategy: Strategy, keep: Mapping[str, str | tuple[str, ...]]) -> Strategy:
    return replace(strategy, signatures=keep)


def _signed(
    strategy: Strategy, calls: tuple[str, ...], text: str | tuple[str, ...] | None
) -> Strategy:
    """In the order of names: equal choices give equal strategies, whatever way led there."""
    found = {name: said for name, said in strategy.signatures.items() if name not in calls}
    if text is not None:
        found |= dict.fromkeys(calls, text)
    return replace(strategy, signatures=dict(sorted(found.items())))


def _laid(
    entry: str, pattern: str, sbps: SBPs | None, fixed: Mapping[str, SBPs], strategy: Strategy
) -> Strategy:
    """Behind what is fixed, before all other patterns, of which the first counts; "*" behind all."""
    held: Mapping[str, SBPs] = getattr(strategy, entry)
    if held.get(pattern) == sbps:
        return strategy
    rest = {name: said for name, said in held.items() if name not in (*fixed, pattern)}
    new = {} if sbps is None else {pattern: sbps}
    ordered = {**fixed, **rest, **new} if pattern == "*" else {**fixed, **new, **rest}
    changed: dict[str, Any] = {entry: ordered}
    return replace(strategy, **changed)
