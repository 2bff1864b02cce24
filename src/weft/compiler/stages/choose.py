"""Choose the stage of each forward call of a pipeline, and the homes of variables.

A forward call goes where a pattern of the strategy puts its module, else where `weft.stage` in the code puts it,
else, for `stages=n` without either, where the even split puts it; any other call follows its
operands, into the last of their stages.

Before: a captured graph whose calls are all in stage 0. After: the same graph with stages in its phases, where a
backward call is in the stage of its forward call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.compiler.context import Context, Options, Stages
from weft.compiler.stages.balance import even_stages
from weft.compiler.stages.stages import (
    check_homes,
    check_in_flight,
    check_patterns,
    pattern_stages,
    stage_placements,
)
from weft.errors import StrategyError
from weft.ir.logical import Call, Input, LogicalGraph, Node, Phase, Update
from weft.strategy.parts import Stage


def choose_stages(graph: LogicalGraph, context: Context) -> Context:
    """Decide the placement of each stage, the stages of forward calls, and where variables live.

    Args:
        graph: as captured; phases say what is backward.
        context: with the stages and the cost model, and all ranks. If another program has decided the homes
            of variables, what reads them follows; where the even split decided for another shape of the
            batch, the same calls keep their stages.

    Raises:
        StrategyError: when stages, patterns or notes in the code do not fit the graph.
    """
    options, homes = context.options, context.homes
    placements = stage_placements(options.stages, context.placement)
    check_in_flight(options.in_flight, len(placements))
    if len(placements) == 1:
        return replace(context, stages=Stages(placements))
    before = context.before.calls if context.before else {}
    fixed, given = _fixed(graph, options, len(placements), homes, before)
    forward = _forward(graph, fixed, given)
    found = {}
    for node in graph.of_kind(Input):
        if node.role in ("parameter", "buffer"):
            readers = (first_result(user) for user in graph.users[node.value.name])
            read = (forward[name] for name in readers if name in forward)
            found[node.key] = given.get(node.key, next(read, 0))
    if homes is None:
        count = len(placements)
        idle = sorted(set(range(count)) - set(forward.values()))
        if idle:
            raise StrategyError(
                f"nothing of the model's forward runs in stage {', '.join(map(str, idle))} of {count}; name "
                "modules in its patterns, use weft.stage in the model, or take fewer stages"
            )
    kinds = {call_kind(name, call): forward[name] for name, call in forward_calls(graph).items()}
    return replace(context, stages=Stages(placements, found, kinds))


def _fixed(
    graph: LogicalGraph,
    options: Options,
    count: int,
    homes: Mapping[str, int] | None,
    before: Mapping[tuple[str, str, str], int],
) -> tuple[dict[str, int], dict[str, int]]:
    """Stages by the name of a forward call's first result, and by the key of a variable, before any dataflow."""
    calls = forward_calls(graph)
    found: dict[str, int] = {}
    for name, call in calls.items():
        stage = call.location.stage if call.location else None
        if stage is not None and stage >= count:
            raise StrategyError(
                f"weft.stage({stage}) at {call.location}: the strategy has {count} stages, 0 to {count - 1}; use one "
                f"of these, or give the strategy {stage + 1}"
            )
        if stage is not None:
            found[name] = stage
    if not isinstance(options.stages, int):
        return _by_patterns(graph, options, found, homes)
    if not found and homes is None:
        found = even_stages(graph, tuple(calls.values()), count, options.cost_model)
    elif not found:
        kinds = {name: call_kind(name, call) for name, call in calls.items()}
        found = {name: before[kind] for name, kind in kinds.items() if kind in before}
    return found, dict(homes or {})


def _by_patterns(
    graph: LogicalGraph,
    options: Options,
    noted: Mapping[str, int],
    homes: Mapping[str, int] | None,
) -> tuple[dict[str, int], dict[str, int]]:
    """The stages that the strategy's patterns name, which go before notes in the code."""
    assert not isinstance(options.stages, int)  # a number has no patterns
    stages = options.stages
    modules = {name: call.module for name, call in forward_calls(graph).items()}
    variables = [node.key for node in graph.of_kind(Input) if node.role in ("parameter", "buffer")]
    if homes is None:
        check_patterns(stages, {*modules.values(), *options.modules}, variables)
    found = {**noted, **_matched(stages, modules)}
    given = _matched(stages, {key: key for key in variables})
    if homes is None:
        check_homes(graph, stages, given, found)
    return found, {**given, **(homes or {})}


def _matched(stages: Sequence[Stage], paths: Mapping[str, str]) -> dict[str, int]:
    found = pattern_stages(stages, list(paths.values()))
    return {name: found[path] for name, path in paths.items() if path in found}


def call_kind(name: str, call: Call) -> tuple[str, str, str]:
    """By which a forward call is known again in the same step for another shape of the batch: `Stages.calls`."""
    return name, call.op, call.module


def _forward(
    graph: LogicalGraph, fixed: Mapping[str, int], homes: Mapping[str, int]
) -> dict[str, int]:
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    made: dict[str, int | None] = {name: homes.get(key) for name, key in keys.items()}
    calls = forward_calls(graph)
    for name, call in calls.items():
        operands = [made.get(used) for used in call.uses]
        known = [stage for stage in operands if stage is not None]
        stage = fixed.get(name, max(known, default=None))
        made.update((value.name, stage) for value in call.makes)
    # Values that read nothing of any stage, such as positions and masks, are made where they are read first.
    for call in reversed(calls.values()):
        names = [value.name for value in call.makes]
        if made[names[0]] is None:
            readers = (node for name in names for node in graph.users[name])
            wanted = (made.get(first_result(node)) for node in readers if isinstance(node, Call))
            known = [stage for stage in wanted if stage is not None]
            made.update(dict.fromkeys(names, min(known, default=0)))
    return {name: made[name] or 0 for name in calls}


def forward_calls(graph: LogicalGraph) -> dict[str, Call]:
    """The forward calls by the name of their first result, in order."""
    return {
        first_result(call): call for call in graph.of_kind(Call) if call.phase.kind == "forward"
    }


def first_result(node: Node) -> str:
    """The name of a call's first result; empty for what is not a call."""
    return node.makes[0].name if isinstance(node, Call) and node.makes else ""


def assign_stages(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with a stage for every call: forward calls as chosen, backward calls with their forward."""
    stages = context.stages
    if len(stages.placements) == 1:
        return graph
    calls = forward_calls(graph)
    forward = {name: stages.calls[call_kind(name, call)] for name, call in calls.items()}
    every = forward | _backward(graph, forward, stages.homes)
    return graph.with_nodes(
        node.changed(phase=Phase(every[first_result(node)], node.phase.kind))
        if isinstance(node, Call)
        else node
        for node in graph.nodes
    )


def _backward(
    graph: LogicalGraph, forward: Mapping[str, int], homes: Mapping[str, int]
) -> dict[str, int]:
    """The stage of every backward call, by the name of its first result.

    Calls that belong to no forward call, such as sums of gradients and the seed, join their operands where these are
    of one stage, else where its result is read: where the value is made that it is the gradient of. A sum to which
    more of a stage is added is there, so that the stage sends its sum alone.
    """
    of_pair: dict[int, int] = {}
    made: dict[str, int] = {}
    for name, call in forward_calls(graph).items():
        made.update((value.name, forward[name]) for value in call.makes)
        if call.autograd is not None:
            of_pair.setdefault(call.autograd, forward[name])
    known: dict[str, int] = {}
    backward = {first_result(c): c for c in graph.of_kind(Call) if c.phase.kind != "forward"}
    for name, call in backward.items():
        if call.autograd in of_pair:
            known[name] = of_pair[call.autograd]
    wanted = _readers(graph, {**forward, **known}, homes)
    for name, call in backward.items():
        operands = {made[used] for used in call.uses if used in made}
        stage = min(operands, default=0)
        if len(operands) != 1 and not _goes_on(graph, call, known, stage):
            stage = wanted.get(name, 0)
        stage = known.get(name, stage)
        made.update((value.name, stage) for value in call.makes)
    return {name: made[name] for name in backward}


def _goes_on(graph: LogicalGraph, call: Call, known: Mapping[str, int], stage: int) -> bool:
    """True if the results of a call are added to more that is made in a stage."""
    readers = (node for value in call.makes for node in graph.users[value.name])
    return any(
        known.get(first_result(graph.producers[used])) == stage
        for reader in readers
        if isinstance(reader, Call) and first_result(reader) not in known
        for used in reader.uses
    )


def _readers(
    graph: LogicalGraph, known: Mapping[str, int], homes: Mapping[str, int]
) -> dict[str, int]:
    """For each call, by its first result, the stage of the first thing that reads it: an update or a known call.

    A reader whose stage is not known stands for its own readers.
    """
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    found: dict[str, int] = {}
    for call in reversed(graph.of_kind(Call)):
        for reader in (n for value in call.makes for n in graph.users[value.name]):
            if isinstance(reader, Update):
                found.setdefault(first_result(call), homes.get(keys[reader.target.name], 0))
            else:
                stage = known.get(first_result(reader), found.get(first_result(reader)))
                if stage is not None:
                    found.setdefault(first_result(call), stage)
    return found
