"""Choose the variables that are sharded, and their layouts: as ZeRO asks, where one can be cut."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

from weft.compiler.context import Context, Stages
from weft.compiler.hints import Hints
from weft.compiler.schedule.presets import turning_stage
from weft.compiler.training.gathers import Gather, gather_parameters
from weft.compiler.training.precision import CASTS
from weft.errors import StrategyError
from weft.ir.logical import Call, Hint, Input, LogicalGraph, Node, Update, Value
from weft.ir.nodes import HINT, renamed
from weft.layout import SBP, Broadcast, Placement, Split
from weft.strategy.parts import ZeroRules, check_zero_patterns, level_of, zero_axis, zero_rules


def choose_shards(graph: LogicalGraph, context: Context) -> Context:
    """Decide what is sharded: what an optimizer updates, as `Options.zero` says; at level 3 other parameters too.

    A parameter whose update needs it whole is whole, also where the strategy splits it; calls that read it take
    parts of it then.

    Another program may have sharded parameters that are alive; nothing else is sharded then.

    The hints get the layouts of the shards; a parameter that stays as it is, is noted, and so are all where another
    program has them whole.

    Raises:
        StrategyError: when no placement has the axis; a pattern names no parameter; or another plan has decided that
            a parameter is in parts, and its update needs it whole.
    """
    stages = context.stages
    stored = {key: axis for own in context.hints.values() for key, axis in own.stored.items()}
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    whole = {keys[u.target.name]: u.rule for u in graph.of_kind(Update) if not u.elementwise}
    context = _kept_whole(context, whole, stored)
    rules = zero_rules(context.options.zero)
    check_zero_patterns(rules, (n.key for n in graph.of_kind(Input) if n.role == "parameter"))
    asked = zero_axis(rules)
    axis = next(iter(stored.values()), None) if asked is None else asked
    if axis is None:
        return context
    if all(axis >= placement.axes for placement in stages.placements):
        first = stages.placements[0]
        raise StrategyError(
            f"weft.Zero(axis={axis}) shards along an axis that {first} does not have; expected "
            f"one of {', '.join(map(str, range(first.axes)))}"
        )
    axis, moved = _along_ranks(axis, stages)
    decided = _is_decided(context.hints, stored)
    search = _Search(graph, context.hints, rules, axis, stages, stored, whole, decided)
    dims = {node.key: search.dim(node) for node in graph.of_kind(Input) if search.concerns(node)}
    sharded = {key: dim for key, dim in dims.items() if isinstance(dim, int)}
    notes = tuple(
        f"zero: {key} stays as it is: {dim}" for key, dim in dims.items() if isinstance(dim, str)
    )
    if decided and not stored:
        notes = (
            "zero: parameters stay whole, in the layouts that open programs of the model use",
            *notes,
        )
    return replace(
        context,
        hints=search.hints_of(sharded),
        stored=dict.fromkeys(sharded, axis),
        notes=(*moved, *notes, *context.notes),
    )


def _kept_whole(context: Context, rules: Mapping[str, str], stored: Collection[str]) -> Context:
    hints = context.hints
    split = {
        key: rule
        for key, rule in rules.items()
        if key in stored
        or any(isinstance(sbp, Split) for own in hints.values() for sbp in own.inputs.get(key, ()))
    }
    decided = _is_decided(hints, stored)
    for key, rule in split.items() if decided else ():
        if not any(key in own.whole for own in hints.values()):
            raise StrategyError(
                f"{key} is stored sharded by an earlier program, but {rule} updates whole tensors. Close the open "
                f"programs and compile the one that trains {key} first, or give {key} weft.broadcast in the first "
                "program's strategy."
            )
    if not split:
        return context
    rule = ", ".join(dict.fromkeys(split.values()))
    note = f"{', '.join(split)} are whole and are used in parts: updates by {rule} need the whole tensor"
    kept = {axes: replace(own, whole=own.whole.union(split)) for axes, own in hints.items()}
    return replace(context, hints=kept, notes=(note, *context.notes))


def _is_decided(hints: Mapping[int, Hints], stored: Collection[str]) -> bool:
    """True if another plan has decided how variables are stored."""
    return bool(stored) or any(each.shares is not None for each in hints.values())


def _along_ranks(asked: int, stages: Stages) -> tuple[int, tuple[str, ...]]:
    """An axis with ranks: that of a placement cut into stages is used up by them; and a note of it."""

    def ranks(axis: int) -> int:
        return max(p.shape[axis] if axis < p.axes else 1 for p in stages.placements)

    last = max(placement.axes for placement in stages.placements)
    axis = next((axis for axis in range(asked, last) if ranks(axis) > 1), asked)
    if len(stages.placements) == 1 or axis == asked:
        return asked, ()
    return axis, (
        f"zero: axis {asked} has one rank in each stage; parameters are sharded along axis {axis}",
    )


@final
@dataclass(frozen=True)
class _Search:
    """Looks for what can be sharded.

    Attributes:
        stored: what another program has sharded; nothing else is then.
        whole: the rules of updates that need the whole tensor, by the key of the parameter.
        decided: true if another plan has decided what is sharded.
    """

    graph: LogicalGraph
    hints: Mapping[int, Hints]
    rules: ZeroRules
    axis: int
    stages: Stages
    stored: Mapping[str, int]
    whole: Mapping[str, str]
    decided: bool

    def concerns(self, node: Input) -> bool:
        """True if a variable is a parameter that is to be sharded where possible."""
        if self.decided:
            return node.key in self.stored
        if node.role != "parameter" or not self.graph.users[node.value.name]:
            return False
        level = level_of(self.rules, node.key)
        name = node.value.name
        updates = (user for user in self.graph.users[name] if isinstance(user, Update))
        return level == 3 or (level > 0 and any(each.target.name == name for each in updates))

    def dim(self, node: Input) -> int | str:
        """The dimension along which a parameter is cut, or why it stays whole."""
        placement, axis = self._home(node), self.axis
        if axis >= placement.axes:
            return f"{placement} has no axis {axis}"
        fixed = self._fixed(node)
        here = fixed[axis]
        if isinstance(here, Split):
            if node.key in self.stored:
                return here.dim
            return f"the strategy splits it along axis {axis} already"
        if node.key in self.whole:
            return f"its update by {self.whole[node.key]} needs the whole tensor"
        taken = {sbp.dim for sbp in fixed if isinstance(sbp, Split)}
        parts, shape = placement.shape[axis], node.value.shape
        free = [dim for dim, size in enumerate(shape) if size >= parts and dim not in taken]
        if not free:
            return f"no free dimension has {parts} elements"
        # The first that shards evenly, else the longest.
        even = [dim for dim in free if shape[dim] % parts == 0]
        return even[0] if even else max(free, key=lambda dim: shape[dim])

    def hints_of(self, dims: Mapping[str, int]) -> dict[int, Hints]:
        """The hints with the layouts of the shards."""
        layouts: dict[int, dict[str, tuple[SBP | None, ...]]] = {axes: {} for axes in self.hints}
        for node in self.graph.of_kind(Input):
            if node.role == "parameter" and node.key in dims:
                fixed = list(self._fixed(node))
                fixed[self.axis] = Split(dims[node.key])
                layouts[self._home(node).axes][node.key] = tuple(fixed)
        return {
            axes: replace(
                given,
                inputs={**given.inputs, **layouts[axes]},
                stored=dict.fromkeys(dims, self.axis),
                shares=None,
            )
            for axes, given in self.hints.items()
        }

    def _home(self, node: Input) -> Placement:
        return self.stages.placements[self.stages.homes.get(node.key, 0)]

    def _fixed(self, node: Input) -> tuple[SBP | None, ...]:
        axes = self._home(node).axes
        return self.hints[axes].inputs.get(node.key, (None,) * axes)


# ZeRO: optimizer states, gradients and parameters in shards along one axis.
#
# The levels are those of Rajbhandari et al. 2020 ("ZeRO", section 5). A sharded parameter's variable is
# Split along the axis; its states and its update go with it. That alone turns the all-reduce of its
# gradient into a reduce-scatter. The levels differ in how long the rest is whole:
#
# - 1: the parameter is gathered once a step; gradients are added up over the micro-batches, then
#   reduced;
# - 2: the gradient of each micro-batch is reduced to its shard, and shards are added up;
# - 3: and each module gathers its parameters for its forward, and again for its backward.
#
# Each parameter has the level that the first pattern for it says.
#
# Before: a graph without layouts, in which calls read parameters, and hints that lay some of them in shards. After:
# calls read them through `weft.hint`, whole; at levels 2 and 3 the sums over micro-batches read gradients in shards.


ACCUMULATE = "weft.accumulate"


def shard_variables(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with gathers of what is sharded, and at levels 2 and 3 with early reductions.

    Hints name the variables that are whole and are split where they are used.
    """
    placements, hints = context.stages.placements, context.hints
    parts: dict[str, Gather] = {}
    for node in graph.of_kind(Input):
        if any(node.key in own.whole for own in hints.values()):
            # How the strategy has it used.
            used = (hints[p.axes].inputs.get(node.key, (None,) * p.axes) for p in placements)
            parts[node.value.name] = Gather((), tuple(map(Hint, used)), False)
    if not context.stored:
        return gather_parameters(graph, parts) if parts else graph
    axis = next(iter(context.stored.values()))
    stored = [node for node in graph.of_kind(Input) if node.key in context.stored]
    shards: dict[str, tuple[Hint, ...]] = {}
    for node in stored:
        home = placements[context.stages.homes.get(node.key, 0)]
        sbp = hints[home.axes].inputs[node.key][axis]
        shards[node.value.name] = _hints(context, axis, sbp)
    # A parameter that only another program shards is gathered as level 3 does.
    rules = zero_rules(context.options.zero)
    levels = {node.value.name: level_of(rules, node.key) or 3 for node in stored}
    whole = _hints(context, axis, Broadcast())
    gathers = {name: Gather(shard, whole, levels[name] == 3) for name, shard in shards.items()}
    early = {name: shard for name, shard in shards.items() if levels[name] > 1}
    made = gather_parameters(graph, {**gathers, **parts}, turning_stage(context))
    return _reduced_early(made, early) if early else made


def _hints(context: Context, stored: int, sbp: SBP | None) -> tuple[Hint, ...]:
    return tuple(
        Hint(tuple(sbp if axis == stored else None for axis in range(placement.axes)), stored)
        for placement in context.stages.placements
    )


def _reduced_early(graph: LogicalGraph, shards: Mapping[str, tuple[Hint, ...]]) -> LogicalGraph:
    """Let gradients be reduced to shards before they are added up over the micro-batches."""
    wanted = {
        name: shards[update.target.name]
        for update in graph.of_kind(Update)
        if update.target.name in shards
        for name in _accumulated(graph, update.source.name)
    }
    nodes: list[Node] = []
    for node in graph.nodes:
        made = next((value.name for value in node.makes), "")
        if isinstance(node, Call) and made in wanted:
            source, hint = graph.values[node.uses[0]], wanted[made][node.phase.stage]
            shard, where = Value(f"{source.name}.shard", source.shape, source.dtype), node.location
            args = (source.ref,)
            nodes += [
                Call.of(HINT, args, (shard,), location=where, phase=node.phase, hint=hint),
                renamed(node, {source.name: shard.name}),
            ]
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _accumulated(graph: LogicalGraph, name: str) -> Iterator[str]:
    """The sums over micro-batches that a gradient is, or is the sum of, in whatever dtype."""
    node = graph.producers[name]
    if isinstance(node, Call) and node.op == ACCUMULATE:
        yield name
    elif isinstance(node, Call) and node.op in ("aten.add.Tensor", *CASTS):
        for used in dict.fromkeys(node.uses):
            yield from _accumulated(graph, used)
