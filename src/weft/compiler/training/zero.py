"""ZeRO: optimizer states, gradients and parameters in shards along one axis.

The levels are those of Rajbhandari et al. 2020 ("ZeRO", section 5). A sharded parameter's variable is
Split along the axis; its states and its update go with it. That alone turns the all-reduce of its
gradient into a reduce-scatter. The levels differ in how long the rest is whole:

- 1: the parameter is gathered once a step; gradients are added up over the micro-batches, then
  reduced;
- 2: the gradient of each micro-batch is reduced to its shard, and shards are added up;
- 3: and each module gathers its parameters for its forward, and again for its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.hints import Hints
from weft.compiler.layouts.box import renamed
from weft.compiler.stages.stages import Stages
from weft.compiler.training.gathers import Gather, gather_parameters
from weft.compiler.training.precision import CASTS
from weft.errors import StrategyError
from weft.ir.logical import (
    Call,
    Hint,
    Input,
    LogicalGraph,
    Node,
    Ref,
    Update,
    Value,
    node_outputs,
    node_uses,
)
from weft.ir.nodes import HINT
from weft.layout import SBP, Broadcast, Placement, Split
from weft.strategy.parts import Zero

ACCUMULATE = "weft.accumulate"


@final
@dataclass(frozen=True)
class Sharded:
    """A graph in which parameters are sharded.

    Attributes:
        graph: with gathers.
        hints: with the shards' layouts; by number of axes of a grid.
        stored: the axis of the shards, for the key of each sharded parameter.
        notes: which parameters stay as they are, and why.
    """

    graph: LogicalGraph
    hints: Mapping[int, Hints]
    stored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def shard_variables(
    graph: LogicalGraph,
    hints: Mapping[int, Hints],
    zero: Zero | None,
    stages: Stages,
) -> Sharded:
    """Shard what an optimizer updates as `zero` says, at level 3 the other parameters too.

    Args:
        graph: without layouts.
        hints: what the strategy fixes, by number of axes of a stage's grid.
        zero: level and axis. None for nothing, but what `hints` say is stored in shards.
        stages: where they run, and where parameters live.

    Raises:
        StrategyError: when no placement has the axis; or a parameter lies in shards already, and its
            update needs it whole.
    """
    stored = {key: axis for each in hints.values() for key, axis in each.stored.items()}
    if zero is None and not stored:
        return Sharded(graph, hints)
    # A program that only reads what another has sharded gathers it as level 3 does.
    zero = zero or Zero(3, next(iter(stored.values())))
    if all(zero.axis >= placement.axes for placement in stages.placements):
        first = stages.placements[0]
        raise StrategyError(
            f"weft.Zero(axis={zero.axis}) shards along an axis that {first} does not have; expected "
            f"one of {', '.join(map(str, range(first.axes)))}"
        )
    zero, moved = _along_ranks(zero, stages)
    pass_ = _Zero(graph, hints, zero, stages, stored)
    dims = {node.key: pass_.dim(node) for node in graph.of_kind(Input) if pass_.concerns(node)}
    sharded = {key: dim for key, dim in dims.items() if isinstance(dim, int)}
    notes = tuple(
        f"zero: {key} stays as it is: {dim}" for key, dim in dims.items() if isinstance(dim, str)
    )
    axes = dict.fromkeys(sharded, zero.axis)
    return Sharded(pass_.graph_of(sharded), pass_.hints_of(sharded), axes, moved + notes)


def _along_ranks(zero: Zero, stages: Stages) -> tuple[Zero, tuple[str, ...]]:
    """`zero` along an axis with ranks: that of a placement cut into stages is used up by them; and a note of it."""

    def ranks(axis: int) -> int:
        return max(p.shape[axis] if axis < p.axes else 1 for p in stages.placements)

    last = max(placement.axes for placement in stages.placements)
    axis = next((axis for axis in range(zero.axis, last) if ranks(axis) > 1), zero.axis)
    if len(stages.placements) == 1 or axis == zero.axis:
        return zero, ()
    note = f"zero: axis {zero.axis} has one rank in each stage; shards lie along axis {axis}"
    return replace(zero, axis=axis), (note,)


@final
@dataclass(frozen=True)
class _Zero:
    graph: LogicalGraph
    hints: Mapping[int, Hints]
    zero: Zero
    stages: Stages
    stored: Mapping[str, int]

    def concerns(self, node: Input) -> bool:
        """True where a variable is a parameter that is to be sharded where possible."""
        if self.stored or any(each.shares is not None for each in self.hints.values()):
            return node.key in self.stored  # another plan has decided it
        if node.role != "parameter" or not self.graph.users[node.value.name]:
            return False
        return self.zero.level == 3 or self._update(node) is not None

    def dim(self, node: Input) -> int | str:
        """The dimension along which a parameter is cut, or why it stays whole."""
        placement, axis = self._home(node), self.zero.axis
        if axis >= placement.axes:
            return f"{placement} has no axis {axis}"
        fixed = self._fixed(node)
        here = fixed[axis]
        if isinstance(here, Split):
            if node.key in self.stored:
                self._check_update(node)
                return here.dim
            return f"the strategy splits it along axis {axis} already"
        update = self._update(node)
        if update is not None and not update.elementwise:
            return f"its update by {update.rule} needs the whole tensor"
        taken = {sbp.dim for sbp in fixed if isinstance(sbp, Split)}
        found = _best_dim(node.value.shape, taken, placement.shape[axis])
        return f"no free dimension has {placement.shape[axis]} elements" if found is None else found

    def graph_of(self, dims: Mapping[str, int]) -> LogicalGraph:
        """The graph with gathers, and at levels 2 and 3 with early reductions."""
        names = {node.key: node.value.name for node in self.graph.of_kind(Input)}
        shards = {names[key]: self._hints(Split(dim)) for key, dim in dims.items()}
        whole, every = self._hints(Broadcast()), self.zero.level == 3
        gathers = {name: Gather(shard, whole, every) for name, shard in shards.items()}
        graph = gather_parameters(self.graph, gathers)
        return graph if self.zero.level == 1 else self._reduced_early(graph, shards)

    def hints_of(self, dims: Mapping[str, int]) -> dict[int, Hints]:
        """The hints with the layouts of the shards."""
        layouts: dict[int, dict[str, tuple[SBP | None, ...]]] = {axes: {} for axes in self.hints}
        for node in self.graph.of_kind(Input):
            if node.role == "parameter" and node.key in dims:
                fixed = list(self._fixed(node))
                fixed[self.zero.axis] = Split(dims[node.key])
                layouts[self._home(node).axes][node.key] = tuple(fixed)
        return {
            axes: Hints({**given.inputs, **layouts[axes]}, dict.fromkeys(dims, self.zero.axis))
            for axes, given in self.hints.items()
        }

    def _home(self, node: Input) -> Placement:
        return self.stages.placements[self.stages.homes.get(node.key, 0)]

    def _fixed(self, node: Input) -> tuple[SBP | None, ...]:
        axes = self._home(node).axes
        return self.hints[axes].inputs.get(node.key, (None,) * axes)

    def _check_update(self, node: Input) -> None:
        update = self._update(node)
        if update is not None and not update.elementwise:
            raise StrategyError(
                f"{node.key} lies in shards, as the plan made first did not train it, and its update by {update.rule} "
                "needs the whole tensor: close the open programs of the model and compile again, now that it is trained"
            )

    def _update(self, node: Input) -> Update | None:
        users = self.graph.users[node.value.name]
        updates = (user for user in users if isinstance(user, Update))
        return next((one for one in updates if one.target.name == node.value.name), None)

    def _hints(self, sbp: SBP) -> tuple[Hint, ...]:
        """For each stage a hint that fixes the axis alone."""
        stored = self.zero.axis
        return tuple(
            Hint(tuple(sbp if axis == stored else None for axis in range(placement.axes)), stored)
            for placement in self.stages.placements
        )

    def _reduced_early(
        self, graph: LogicalGraph, shards: Mapping[str, tuple[Hint, ...]]
    ) -> LogicalGraph:
        """Let gradients be reduced to shards before they are added up over the micro-batches."""
        wanted = {
            name: shards[update.target.name]
            for update in graph.of_kind(Update)
            if update.target.name in shards
            for name in _accumulated(graph, update.source.name)
        }
        nodes: list[Node] = []
        for node in graph.nodes:
            made = next((value.name for value in node_outputs(node)), "")
            if isinstance(node, Call) and made in wanted:
                hint = self._shard_hint(graph, node, wanted[made][node.phase.stage])
                shard = node_outputs(hint)[0].name
                nodes += [hint, renamed(node, {node_uses(node)[0]: shard})]
            else:
                nodes.append(node)
        return replace(graph, nodes=tuple(nodes))

    def _shard_hint(self, graph: LogicalGraph, reader: Call, hint: Hint) -> Call:
        source = graph.values[node_uses(reader)[0]]
        shard = Value(f"{source.name}.shard", source.shape, source.dtype)
        args = (Ref(source.name),)
        return Call(HINT, args, (), (shard,), reader.location, reader.phase, hint=hint)


def _best_dim(shape: tuple[int, ...], taken: set[int], parts: int) -> int | None:
    """A dimension that no other axis splits: the first that shards evenly, else the longest."""
    free = [dim for dim, size in enumerate(shape) if size >= parts and dim not in taken]
    even = [dim for dim in free if shape[dim] % parts == 0]
    return even[0] if even else max(free, key=lambda dim: shape[dim], default=None)


def _accumulated(graph: LogicalGraph, name: str) -> Iterator[str]:
    """The sums over micro-batches that a gradient is, or is the sum of, in whatever dtype."""
    node = graph.producers[name]
    if isinstance(node, Call) and node.op == ACCUMULATE:
        yield name
    elif isinstance(node, Call) and node.op in ("aten.add.Tensor", *CASTS):
        for used in dict.fromkeys(node_uses(node)):
            yield from _accumulated(graph, used)
