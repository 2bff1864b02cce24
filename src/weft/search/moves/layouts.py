"""Moves of layouts: signatures of groups of ops and of single ones, along edges, parameters, entries of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from random import Random
from typing import Any, TypeAlias, final

from weft.cached import cached_property
from weft.compiler.decompositions.table import legal_signatures
from weft.errors import RuleError
from weft.ir.logical import Call, Input, LogicalGraph
from weft.layout import SBP, broadcast, split
from weft.ops import Signature
from weft.patterns import around, first_match
from weft.planning.stored_step import StoredStep
from weft.search.moves.sequences import LazyMoves, Several, StrategyMove, chain_moves
from weft.search.steps.parts import ForwardCalls
from weft.search.steps.repeated import Blocks, starred_path
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs
from weft.units import Bytes


@final
@dataclass(frozen=True)
class Group:
    """Calls of one op at the same place of blocks.

    Attributes:
        name: of the first call's first result.
        calls: the names of their first results.
        size: bytes that the first call reads and writes.
    """

    name: str
    calls: tuple[str, ...]
    size: Bytes


@final
@dataclass(frozen=True)
class GroupEdge:
    """A value that a call of one group makes and a call of another reads.

    Attributes:
        source, target: the names of the groups.
        result: its number among the results of the source.
        operand: its number among the operands of the target.
        size: its bytes.
    """

    source: str
    target: str
    result: int
    operand: int
    size: Bytes


def groups_of(graph: LogicalGraph, blocks: Blocks | None) -> tuple[Group, ...]:
    """The groups of a step; those that read and write most first."""
    seen: dict[tuple[str, str, int, bool], list[Call]] = {}
    places: dict[tuple[str, bool], int] = {}
    for call in graph.of_kind(Call):
        if call.hint is not None or not call.makes:
            continue
        module = call.location.module if call.location is not None else ""
        forward = call.phase.kind == "forward"
        place = places[module, forward] = places.get((module, forward), -1) + 1
        key = call.op, starred_path(blocks, module), place, forward
        seen.setdefault(key, []).append(call)
    found = list[Group]()
    for own in seen.values():
        names = (*own[0].uses, *(value.name for value in own[0].makes))
        size = Bytes(sum(graph.values[each].nbytes for each in names))
        found.append(Group(_name(own[0]), tuple(map(_name, own)), size))
    return tuple(sorted(found, key=lambda each: -each.size))


def places_of(names: Iterable[str], blocks: Blocks | None) -> dict[str, list[str]]:
    """The names of variables that each pattern stands for: the same place in every block."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(starred_path(blocks, name), []).append(name)
    return found


def edges_of(graph: LogicalGraph, groups: Sequence[Group]) -> tuple[GroupEdge, ...]:
    """The edges between groups, each pair of ends once; the largest first."""
    group = {call: each.name for each in groups for call in each.calls}
    made = {
        value.name: (group[_name(call)], number)
        for call in graph.of_kind(Call)
        if call.makes and _name(call) in group
        for number, value in enumerate(call.makes)
    }
    found: dict[tuple[str, str], GroupEdge] = {}
    for call in graph.of_kind(Call):
        if not call.makes or _name(call) not in group:
            continue
        for operand, used in enumerate(call.uses):
            source, result = made.get(used, ("", 0))
            target = group[_name(call)]
            if source and source != target:
                size = graph.values[used].nbytes
                found.setdefault((source, target), GroupEdge(source, target, result, operand, size))
    return tuple(sorted(found.values(), key=lambda each: -each.size))


def legal_signatures_of(graph: LogicalGraph, parts: int) -> Mapping[str, tuple[Signature, ...]]:
    """For each call, by its first result, the signatures that its op's rule has on so many ranks; () without a rule."""
    return {
        _name(call): _legal(graph, call, parts)
        for call in graph.of_kind(Call)
        if call.makes and call.hint is None
    }


def _legal(graph: LogicalGraph, call: Call, parts: int) -> tuple[Signature, ...]:
    try:
        return legal_signatures(call.first, parts, False)
    except RuleError:
        return ()


def _name(call: Call) -> str:
    return call.makes[0].name


# For each axis.
Signatures: TypeAlias = tuple[Signature, ...]


@final
@dataclass(frozen=True)
class LayoutMoves:
    """The moves of layouts on one grid of ranks."""

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
        return tuple(self._legal[parts][call][: None if parts > 1 else 1] for parts in self.grid)

    @cached_property
    def groupwise(self) -> Several:
        """Every signature of every group, and none."""
        none = StrategyMove("no signature fixed", partial(replace, signatures=self.base.signatures))
        return chain_moves(
            ((none,), *(self._of_calls(each.name, each.calls) for each in self.groups))
        )

    @cached_property
    def single(self) -> Several:
        """Every signature of every single call of a group of several."""
        several = (group for group in self.groups if len(group.calls) > 1)
        calls = (call for group in several for call in group.calls)
        return chain_moves(self._of_calls(f"only {call}", (call,)) for call in calls)

    def _of_calls(self, name: str, calls: tuple[str, ...]) -> Several:
        """The deduced signatures, then each that is legal, where there are several."""
        every = self._every(calls[0])
        count = prod(map(len, every))

        def made(number: int) -> StrategyMove:
            if not number:
                return StrategyMove(f"{name} deduced", partial(_signed, calls=calls, text=None))
            return self._signed(name, calls, _nth(every, number - 1))

        return LazyMoves(count + 1 if count > 1 else 0, made)

    def _signed(self, name: str, calls: tuple[str, ...], each: Signatures) -> StrategyMove:
        texts = tuple(map(str, each))
        text = texts[0] if len(texts) == 1 else texts
        return StrategyMove(f"{name} {' | '.join(texts)}", partial(_signed, calls=calls, text=text))

    def drawn_along_edge(self, random: Random) -> StrategyMove | None:
        """Both ends of an edge with signatures that agree on what goes along it; None if none was drawn.

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
        return StrategyMove(f"{one.name}, {two.name}", lambda strategy: two.on(one.on(strategy)))

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
        said = [
            StrategyMove(
                f"{pattern} {', '.join(map(str, sbps))}",
                partial(_laid, entry, pattern, said_of(sbps), getattr(self.base, entry)),
            )
            for entry, pattern, shape in free
            for sbps in product(*(choices_of(shape, parts) for parts in self.grid))
        ]
        for entry, pattern, _ in free:
            without = partial(_laid, entry, pattern, None, getattr(self.base, entry))
            said.append(StrategyMove(f"{pattern} deduced", without))
        return tuple(said)

    def _leaves(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Patterns of the batch's leaves, and their shapes; of all, the least in each dimension that all have."""
        shapes = self._shapes("batch")
        dims = min((len(shape) for shape in shapes.values()), default=0)
        if dims:
            yield "*", tuple(map(min, zip(*shapes.values(), strict=False)))
        if len(shapes) > 1:
            yield from shapes.items()

    def _shapes(self, role: str) -> dict[str, tuple[int, ...]]:
        return {
            node.key: tuple(node.value.shape)
            for node in self.step.graph.of_kind(Input)
            # Recurrent layers are laid out as they were captured.
            if node.role == role and node.value.shape and node.key not in self.step.recurrent
        }


def choices_of(shape: Sequence[int], parts: int) -> list[SBP]:
    """Layouts of a stored tensor along an axis of so many ranks."""
    return [broadcast, *(split(dim) for dim, size in enumerate(shape) if size >= parts > 1)]


def said_of(sbps: tuple[SBP, ...]) -> SBPs:
    """The layouts along all axes as a strategy says them."""
    return sbps[0] if len(sbps) == 1 else sbps


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
    """Behind what is fixed, before all other patterns, of which the first counts; "*" after all."""
    held: Mapping[str, SBPs] = getattr(strategy, entry)
    if held.get(pattern) == sbps:
        return strategy
    rest = {name: said for name, said in held.items() if name not in (*fixed, pattern)}
    new = {} if sbps is None else {pattern: sbps}
    ordered = {**fixed, **rest, **new} if pattern == "*" else {**fixed, **new, **rest}
    changed: dict[str, Any] = {entry: ordered}
    return replace(strategy, **changed)


# Layouts along a model: all parameters, or those alike, from one place on or up to it, are laid out alike. So the wide
# layers at the end of a net are split by channels together. Runs come first whose gradients are larger than what goes
# in and out of their layers, which is sent instead.


# Runs of which layouts are tried, those that save most.
MOST = 32


@final
@dataclass(frozen=True)
class Weight:
    """A parameter, with the number of the unit that it is in.

    `saved` are the bytes of its gradient beyond the input and output of its module; 0 with one dimension, since
    biases and norms are laid out as is best for the weights around them.
    """

    key: str
    shape: tuple[int, ...]
    unit: int
    saved: int


def weights_of(step: StoredStep, calls: ForwardCalls, units: Sequence[str]) -> list[Weight]:
    """The parameters of a step that are in units: paths of modules, in order.

    Signatures of recurrent layers are left out: they stay as captured.
    """
    number, found = {path: place for place, path in enumerate(units)}, []
    for node in step.graph.of_kind(Input):
        if node.key in step.recurrent or node.role != "parameter" or not node.value.shape:
            continue
        place = next((number[path] for path in around(node.key) if path in number), None)
        if place is not None:
            own = calls.inside.get(node.key.rpartition(".")[0], frozenset())
            several = len(node.value.shape) > 1
            saved = calls.sizes[node.value.name] - calls.moved(own) if several else 0
            found.append(Weight(node.key, tuple(node.value.shape), place, saved))
    return found


@final
@dataclass(frozen=True)
class WeightRun:
    """Parameters of one name and as many dimensions, or all, from one unit on or up to one: two at least."""

    weights: tuple[Weight, ...]

    @property
    def saved(self) -> int:
        """Bytes of their gradients beyond those that go in and out of their modules."""
        return sum(each.saved for each in self.weights)

    def moves(self, grid: Sequence[int], fixed: Mapping[str, SBPs]) -> Iterator[StrategyMove]:
        """Every layout of all of them on a grid of ranks, beside the layouts that are fixed."""
        least = [min(sizes) for sizes in zip(*(each.shape for each in self.weights), strict=False)]
        for sbps in product(*(choices_of(least, parts) for parts in grid)):
            name = f"{self.weights[0].key} to {self.weights[-1].key} {', '.join(map(str, sbps))}"
            laid = {each.key: said_of(sbps) for each in self.weights}
            yield StrategyMove(name, partial(_laid_together, laid, fixed), float(self.saved))


def runs_of(weights: Sequence[Weight], fixed: Mapping[str, SBPs]) -> tuple[WeightRun, ...]:
    """The runs that save most, in this order, without parameters whose layouts are fixed."""
    alike: dict[tuple[str, int], list[Weight]] = defaultdict(list)
    for each in weights:
        if first_match(fixed, each.key) is None:
            alike["any", 0].append(each)
            if len(each.shape) > 1:
                alike[each.key.rpartition(".")[2], len(each.shape)].append(each)
    found = dict[tuple[Weight, ...], WeightRun]()
    for own in alike.values():
        for place in sorted({each.unit for each in own}):
            for run in (w for w in own if w.unit >= place), (w for w in own if w.unit <= place):
                several = tuple(run)
                if len(several) > 1:
                    found[several] = WeightRun(several)
    return tuple(sorted(found.values(), key=lambda run: -run.saved)[:MOST])


def _laid_together(
    laid: Mapping[str, SBPs], fixed: Mapping[str, SBPs], strategy: Strategy
) -> Strategy:
    """Behind what is fixed, before all other patterns, of which the first counts; as it is where nothing changes."""
    held = strategy.parameters
    first = {key: first_match(held, key) for key in laid}
    if all(pattern and held[pattern] == laid[key] for key, pattern in first.items()):
        return strategy
    rest = {name: said for name, said in held.items() if name not in laid}
    return replace(strategy, parameters={**fixed, **laid, **rest})
